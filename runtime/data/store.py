"""Folders of prepared data: published atomically, verified by sha256, shared by hard links.

`meta.json` of a folder describes its contents. Its "sha256" covers the contents and their settings, so that a
checkpoint can name the data of its run. The entries ABOUT (the request, and the places of token files elsewhere) are
not covered, and belong to one run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runtime.data import readers
from runtime.data.files import DataError, descriptor_of_regular, fingerprint, open_regular, sync_folder, write_and_sync
from runtime.data.pieces import Journal

# --- A lock between processes that reports its holder. The kernel releases it when a process dies

SAID_AFTER_S = 2.0
POLL_S = 0.1
MAX_HOLDER_BYTES = 4096


@contextmanager
def hold_lock(path: Path, purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`, which then names this process and `purpose`.

    While another process holds it, `say` is called repeatedly with its name, from 2 s on. Raises OSError or DataError
    if the path is no regular file: a symbolic link, a pipe.
    """
    handle = descriptor_of_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        begun = time.monotonic()
        while not _try_lock(handle):
            if time.monotonic() - begun > SAID_AFTER_S:
                say(f"waiting for {_holder(handle)} (lock: {path})")
            time.sleep(POLL_S)
        with suppress(OSError):  # on a full disk the lock is held without a name
            os.ftruncate(handle, 0)
            holder = f"process {os.getpid()}, which prepares data for {purpose}"
            os.pwrite(handle, holder.encode("utf-8", "surrogateescape"), 0)  # a path may have any bytes
        yield
    finally:
        os.close(handle)


@contextmanager
def hold_lock_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock file if no other process does. Yield whether it is held."""
    handle = descriptor_of_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(handle: int) -> str:
    text = os.pread(handle, MAX_HOLDER_BYTES, 0).decode("utf-8", "replace")
    return text or "another process, which prepares data"


# --- store

META = "meta.json"
ABOUT = ("source", "skipped", "request", "places")
MAX_META_BYTES = 256 << 20
BUILDING = ".building-"
PARTS = ".parts-"  # journals, with which preparation continues after a kill
PARTS_KEPT_S = 14 * 86400.0
Meta = Mapping[str, Any]


# ---------------------------------------------------------------- meta.json
def with_digests(values: Meta) -> dict[str, Any]:
    """Add the digest of the contents and the digest of all values to the values of a meta.json."""
    values = {name: value for name, value in values.items() if name not in ("sha256", "meta_sha256")}
    contents = {name: value for name, value in values.items() if name not in ABOUT}
    values["sha256"] = _digest(contents)
    return values | {"meta_sha256": _digest(values)}


def _digest(values: Meta) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _text(meta: Meta) -> str:
    return json.dumps(with_digests(meta), indent=1, sort_keys=True) + "\n"


def meta_of(folder: Path) -> Meta | None:
    """Return the meta.json of a folder; None if it is missing or damaged. Other files are not checked."""
    path = folder / META
    if folder.is_symlink() or path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_META_BYTES:
        return None
    try:
        with open_regular(path) as stream:
            text = stream.read(MAX_META_BYTES).decode("utf-8")
        meta = json.loads(text)
        return meta if text == _text(meta) else None
    except (ValueError, TypeError, AttributeError, OSError, RecursionError):
        return None


def verified_meta(folder: Path) -> Meta | None:
    """Return the meta.json of a folder if it and every file are undamaged (size and sha256) and token files elsewhere
    have not changed; else None."""
    meta = meta_of(folder)
    if meta is None:
        return None
    try:
        names = set(meta["files"])
        present = {entry.name for entry in folder.iterdir()}
        if present != names | {META} or any((folder / name).is_symlink() for name in names):
            return None
        intact = all(fingerprint(folder / name) == meta["files"][name] for name in names)
    except (ValueError, KeyError, TypeError, OSError):
        return None
    return meta if intact and are_places_unchanged(meta.get("places", {})) else None


def place(prefix: Path) -> dict[str, Any]:
    """Return the path of a token shard elsewhere, with sizes and times that reveal a change. OSError if it is
    missing."""
    statuses = [os.lstat(prefix.with_name(f"{prefix.name}{suffix}")) for suffix in (".idx", ".bin")]
    return {
        "prefix": str(prefix.absolute()),
        "seen": [[status.st_size, status.st_mtime_ns, status.st_ino] for status in statuses],
    }


def are_places_unchanged(places: Any) -> bool:
    """Whether token shards elsewhere still exist and have not changed since meta.json was written."""
    try:
        return all(place(Path(saved["prefix"])) == saved for row in places.values() for saved in row)
    except (OSError, KeyError, TypeError, AttributeError):
        return False


def about_of(meta: Meta) -> dict[str, Any]:
    """Return the entries ABOUT of a meta.json."""
    return {name: meta[name] for name in ABOUT if name in meta}


def key_of(parts: Sequence[object]) -> str:
    """Return the sha256 of values as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def folders(parent: Path) -> Iterator[Path]:
    """Yield the folders of prepared data in `parent`, in the order of names."""
    return (path.parent for path in sorted(parent.glob(f"[!.]*/{META}")))


# ---------------------------------------------------------------- writing
def publish(parent: Path, name: str, write: Callable[[Path], Meta]) -> Meta:
    """Publish `where/name` atomically. Return its meta.json.

    `write` fills an empty folder and returns the values of meta.json except "files". The caller holds the lock of
    `name`.
    """
    folder, building = parent / name, parent / f"{BUILDING}{name}"
    if folder.is_symlink():
        raise DataError(f"{folder}: a symbolic link where prepared data belongs; remove it")
    building.mkdir()
    try:
        values = dict(write(building))
        if "files" not in values:
            values["files"] = {path.name: fingerprint(path) for path in sorted(building.iterdir())}
        write_and_sync(building / META, _text(values))
        sync_folder(building)
        if folder.exists():  # it is damaged
            shutil.rmtree(folder)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    sync_folder(parent)
    return with_digests(values)


def publish_links(parent: Path, name: str, entry: Path, values: Meta) -> Meta:
    """Publish `where/name` with the files of another folder, by hard links, or copies if links are impossible."""

    def write(building: Path) -> Meta:
        for file in values["files"]:
            link(entry / file, building / file)
        return values

    return publish(parent, name, write)


def link(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy if that is impossible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or one without links
        with open_regular(source) as stream, target.open("xb") as copy:
            shutil.copyfileobj(stream, copy)
            copy.flush()
            os.fsync(copy.fileno())


def update_about(folder: Path, meta: Meta, about: Meta) -> Meta:
    """Update the entries ABOUT and the time of use of a verified folder's meta.json. Return the new meta.json."""
    if about_of(meta) != about:
        meta = with_digests({**meta, **about})
        with TemporaryDirectory(prefix=BUILDING, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            write_and_sync(Path(temporary) / META, _text(meta))
            (Path(temporary) / META).replace(folder / META)
        sync_folder(folder)
    os.utime(folder / META)
    return meta


@contextmanager
def journal(parent: Path, text: str) -> Iterator[Journal]:
    """Open the journal with the results of a text's batches. The caller holds the lock of `text`. With another batch
    size the journal starts empty.

    The file is removed at the end of the block, with journals of other texts that were not used for 14 days. It is
    removed after a DataError, too, because the text or the tokenizer then has to change.
    """
    with Journal(parent / f"{PARTS}{text}", f"{text} {readers.BATCH_BYTES}") as opened:
        try:
            yield opened
        except DataError:
            opened.path.unlink()
            raise
    for leftover in parent.glob(f"{PARTS}*"):
        with suppress(OSError):
            if leftover == opened.path or time.time() - leftover.stat().st_mtime > PARTS_KEPT_S:
                leftover.unlink()


@contextmanager
def shared_lock(cache: Path, text: str, purpose: str, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the entries of one text in a shared cache: those whose names begin with `text`."""
    with hold_lock(_lock_of(cache, text), purpose, say):
        for leftover in cache.glob(f"{BUILDING}*"):
            owner = leftover.name.removeprefix(BUILDING).partition("-")[0]
            with nullcontext(True) if owner == text else hold_lock_if_free(_lock_of(cache, owner)) as is_left:
                if is_left:  # left by a killed process
                    shutil.rmtree(leftover, ignore_errors=True)
        yield


def _lock_of(cache: Path, text: str) -> Path:
    return cache / f".lock-{text}"


@contextmanager
def run_lock(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of the data of one run."""
    with hold_lock(out / ".lock", str(out), say):
        for leftover in out.glob(f"{BUILDING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
