"""Writes a build folder. It replaces an earlier build, and never removes files that dsc did not write."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from runtime.build.files import MANIFEST, file_names, is_at_path, read_file
from runtime.system.outcome import printable

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TRIES = 100  # attempts, while other processes create, replace and remove the folder


def check_place(folder: Path) -> None:
    """Raise OSError, with a hint, if a build cannot be written to `folder` without removing foreign files."""
    place = folder.resolve()
    if Path.cwd().is_relative_to(place):
        raise FileExistsError(f"{folder} is or contains the current folder: cd out of it, or choose another with -o")
    parent = next(parent for parent in place.parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is a file, not a folder: choose another folder with -o")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"{parent} is not writable: choose another folder with -o")
    if not place.exists():
        return
    if not place.is_dir():
        raise NotADirectoryError(f"{folder} is a file: choose another folder with -o")
    for _ in range(_TRIES):
        try:
            top = os.open(
                place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )  # stays this build even if another replaces it
        except FileNotFoundError:
            return
        try:
            return _check_contents(folder, top)
        except OSError:
            if is_at_path(place, top):
                raise
        finally:
            os.close(top)
    raise _busy(place)


def _check_contents(folder: Path, top: int) -> None:
    if not os.listdir(top):
        return
    written = _written(top)
    if written is None:
        raise FileExistsError(f"{folder} is not empty and is not a build of dsc: choose another folder with -o")
    foreign = sorted(file_names(top) - written)
    if foreign:
        suffix = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FileExistsError(
            f"{folder} contains files that are not part of its build, {printable(foreign[0])}{suffix}:"
            " move them elsewhere, or choose another folder with -o"
        )


def _written(top: int) -> set[str] | None:
    """The files of a build by its manifest, or None if it has no manifest of dsc.

    Only the names of files are read, because another version of dsc may have written the manifest with other keys.
    """
    try:
        manifest = json.loads(read_file(top, MANIFEST))
        return set(manifest["files"]) if "spec.resolved" in manifest["files"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_build(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Replace `folder` by the build atomically: it is written next to it and then moved into place, so that a reader
    sees either the earlier build or this one.

    `files`: (path in the folder, text). Raises OSError, as `check_place` does.
    """
    check_place(folder)
    place = folder.resolve()  # a symbolic link is kept
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        for name, text in files:
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        put_folder(new, place)


def put_folder(new: Path, place: Path) -> None:
    """Move the folder `new` to `place`. A folder that was there is moved to `new`."""
    for _ in range(_TRIES):
        try:
            if place.exists():
                _exchange(new, place)
            else:
                new.rename(place)
        except OSError as error:  # another process has created or removed a build there
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise _busy(place)


def _busy(place: Path) -> FileExistsError:
    return FileExistsError(f"other processes keep replacing {place}: choose another folder with -o")


def _exchange(new: Path, place: Path) -> None:
    """Swap two folders, atomically if the file system supports it."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE)
    if hasattr(libc, "renameat2") and libc.renameat2(*arguments) == 0:
        return
    code = ctypes.get_errno() if hasattr(libc, "renameat2") else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(place))
    old = new.with_name("old")  # not atomic: for a moment there is no build
    place.rename(old)
    new.rename(place)
