"""Files → build folder. It replaces an earlier build and nothing else: what dsc has not written, it does not remove."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from runtime.build.files import MANIFEST, file_names, is_there, read_file
from runtime.system.outcome import printable

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TRIES = 100  # to take the place of a folder that others make, replace and remove meanwhile


def check_place(folder: Path) -> None:
    """Raises OSError, with what to do, where a build cannot be put at `folder` without removing what is not dsc's."""
    place = folder.resolve()
    if Path.cwd().is_relative_to(place):
        raise FileExistsError(f"{folder} is the current folder or holds it: go out of it, or choose another with -o")
    parent = next(parent for parent in place.parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is a file, so there is no {folder}: choose another folder with -o")
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"{parent} cannot be written to: choose another folder with -o")
    if not place.exists():
        return
    if not place.is_dir():
        raise NotADirectoryError(f"{folder} is a file: choose another folder with -o")
    for _ in range(_TRIES):
        try:
            top = os.open(
                place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )  # one build, though another takes its place
        except FileNotFoundError:
            return
        try:
            return _check_contents(folder, top)
        except OSError:
            if is_there(place, top):
                raise
        finally:
            os.close(top)
    raise _busy(place)


def _check_contents(folder: Path, top: int) -> None:
    if not os.listdir(top):
        return
    written = _written(top)
    if written is None:
        raise FileExistsError(f"{folder} is not empty and holds no build of dsc: choose another folder with -o")
    foreign = sorted(file_names(top) - written)
    if foreign:
        others = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FileExistsError(
            f"{folder} holds what is not of its build, {printable(foreign[0])}{others}:"
            " move it elsewhere, or choose another folder with -o"
        )


def _written(top: int) -> set[str] | None:
    """The files of a build, by its manifest; None if it is no manifest of dsc.

    The build may be of another version of dsc, whose manifest has other keys: so only the names of files are read.
    """
    try:
        found = json.loads(read_file(top, MANIFEST))
        return set(found["files"]) if "spec.resolved" in found["files"] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def write_build(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Replace `folder` by the build: written beside it, then moved into place in one step, so that a reader sees the
    earlier build or this one, and never half of one or none.

    files: (path in the folder, text). Raises as `check_place` does.
    """
    check_place(folder)
    place = folder.resolve()  # a link stays, and leads to the build
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        for name, text in files:
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        put_folder(new, place)


def put_folder(new: Path, place: Path) -> None:
    """Move a folder to its place. What was there is left where `new` was."""
    for _ in range(_TRIES):
        try:
            if place.exists():
                _exchange(new, place)
            else:
                new.rename(place)
        except OSError as error:  # another compilation has put its build there meanwhile, or removed one
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise _busy(place)


def _busy(place: Path) -> FileExistsError:
    return FileExistsError(f"{place} is replaced again and again by others: choose another folder with -o")


def _exchange(new: Path, place: Path) -> None:
    """Swap two folders, which the kernel does in one step where the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(place), _RENAME_EXCHANGE)
    if hasattr(libc, "renameat2") and libc.renameat2(*arguments) == 0:
        return
    code = ctypes.get_errno() if hasattr(libc, "renameat2") else errno.ENOSYS
    if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(place))
    old = new.with_name("old")  # for a moment there is no build
    place.rename(old)
    new.rename(place)
