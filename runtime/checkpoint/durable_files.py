"""Crash-safe files: all system calls of a checkpoint, in one module, so that tests can interrupt each of them.

Names are relative to an open folder and links are not followed, so nothing outside the folder is read or written.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK_BYTES = 16 << 20
PUBLISHED = re.compile(r"step-([0-9]{8,})(\.[1-9][0-9]*)?")


def num_published(path: Path) -> int:
    """Count the checkpoints of a folder, valid or not; 0 if it does not exist. OSError if it cannot be read."""
    try:
        with open_folder(path, follow=True) as folder:
            return sum(1 for name in names(folder) if PUBLISHED.fullmatch(name))
    except FileNotFoundError:
        return 0


@contextmanager
def open_folder(path: Path, *, follow: bool = False) -> Iterator[int]:
    """Open a folder and yield its descriptor. `follow`: `path` itself may be a link (one the user named)."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        yield folder
    finally:
        os.close(folder)


def make_folder(folder: int, name: str) -> None:
    os.mkdir(name, 0o755, dir_fd=folder)


def names(folder: int) -> list[str]:
    """Return the sorted entries of a folder."""
    return sorted(os.listdir(folder))


def exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def create(folder: int, name: str, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a new file and sync it to disk. Return its size and sha256. OSError if it exists."""
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    try:
        size, digest = 0, hashlib.sha256()
        for chunk in chunks:
            unwritten = memoryview(chunk)
            size += unwritten.nbytes
            digest.update(unwritten)
            while unwritten.nbytes:
                unwritten = unwritten[os.write(file, unwritten[:CHUNK_BYTES]) :]
        os.fsync(file)
    finally:
        os.close(file)
    return size, digest.hexdigest()


def replace(folder: int, name: str, text: str) -> None:
    """Replace a small file atomically: a reader sees the old or the new contents, never a part."""
    new = f".new-{name}"
    if exists(folder, new):
        os.unlink(new, dir_fd=folder)
    create(folder, new, [text.encode()])
    rename(folder, new, name)


def rename(folder: int, old: str, new: str) -> None:
    """Rename within a folder. Call `sync` to make it durable."""
    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)


def sync(folder: int) -> None:
    """Sync the entries of a folder to disk."""
    os.fsync(folder)


def unlink(folder: int, name: str) -> None:
    os.unlink(name, dir_fd=folder)


def remove(folder: int, name: str) -> None:
    """Remove a folder that has only files."""
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for file in names(inner):
            os.unlink(file, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=folder)


@contextmanager
def open_file(folder: int, name: str) -> Iterator[int]:
    """Open a regular file for reading and yield its descriptor. OSError for links, pipes, devices and folders."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{name} is not a regular file")
        yield file
    finally:
        os.close(file)


def file_size(file: int) -> int:
    return os.fstat(file).st_size


def read_exactly(file: int, start: int, size: int) -> bytearray:
    """Return bytes [start, start + size) of a file. OSError if it is shorter."""
    data = bytearray(size)
    _fill(memoryview(data), file, start)
    return data


def _fill(unfilled: memoryview, file: int, start: int) -> None:
    while unfilled.nbytes:
        num_bytes = os.preadv(file, [unfilled[:CHUNK_BYTES]], start)
        if num_bytes == 0:
            raise OSError(f"ends {unfilled.nbytes} bytes early")
        start, unfilled = start + num_bytes, unfilled[num_bytes:]


def chunks(file: int, size: int) -> Iterator[memoryview]:
    """Yield the first `size` bytes in chunks. A chunk is valid until the next one. OSError if the file is shorter.

    The buffer is reused, because allocating one holds the GIL for milliseconds.
    """
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for start in range(0, size, CHUNK_BYTES):
        part = buffer[: min(CHUNK_BYTES, size - start)]
        _fill(part, file, start)
        yield part


def sha256(file: int, size: int) -> str:
    """Return the digest of the first `size` bytes."""
    digest = hashlib.sha256()
    for part in chunks(file, size):
        digest.update(part)
    return digest.hexdigest()
