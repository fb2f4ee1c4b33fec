"""Output files of commands: new files never overwrite others, old files are replaced atomically."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler.emit.folder import put_folder

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH  # read-only for everybody means for root too
SPEC = ".dsc"


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises FileExistsError if the path exists, even as a link, and other OSErrors."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)


def refuse_output(path: Path, *read: str | Path | None) -> None:
    """Raise the OSError that `write` would raise for this path, before the work is done. Also refuses a path that is
    one of the input files `read` (SPEC or SPEC:RUN), or that has the suffix of a spec."""
    if path.suffix == SPEC or any(_same(path, name) for each in read if each for name in _names(str(each))):
        raise FileExistsError(errno.EEXIST, "it is an input, or a spec: name another file", str(path))
    if is_folder(path):
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file in it", str(path))
    place = _resolved(path)
    if _is_special(place):
        return
    refuse_replacing(place)
    import tempfile

    with tempfile.TemporaryFile(prefix=".dsc-", dir=place.parent):  # the folder exists and is writable
        pass


def put(contents: str, path: Path | None) -> None:
    """Write contents to a file with `write`, or to stdout."""
    if path is None:
        print(contents, end="")
    else:
        write(path, contents.encode())


def write(path: Path, content: bytes) -> None:
    """Write a file, replacing an old one atomically and following links. Pipes and devices are written to directly.

    Raises OSError as `replace` does, and for a pipe without a reader, instead of waiting for one.
    """
    place = _resolved(path)
    if not _is_special(place):
        replace(place, content)
        return
    try:
        handle = os.open(place, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads this pipe", str(path)) from None
        raise
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def status(path: str | Path) -> os.stat_result | None:
    """The status of a file or folder; None if it does not exist, or if the name is not valid."""
    try:
        return Path(path).stat()
    except (OSError, ValueError):
        return None


def is_file(path: str | Path) -> bool:
    """Whether a path, with links followed, is a file."""
    info = status(path)
    return info is not None and stat.S_ISREG(info.st_mode)


def is_folder(path: str | Path) -> bool:
    """Whether a path, with links followed, is a folder."""
    info = status(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def refuse_replacing(path: Path) -> None:
    """Raise the OSError with which `replace` refuses to replace a path."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    if not path.exists():
        return
    info = path.stat()
    if not info.st_mode & WRITABLE or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    if info.st_nlink > 1:
        raise OSError(
            errno.EMLINK, f"it has {info.st_nlink} hard links; the others would keep the old content", str(path)
        )


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, keeping its permissions, or create it.

    Raises FileExistsError if the path is a link or not a regular file, and other OSErrors if the file is read-only
    (even if its folder is not) or has several hard links, of which the others would keep the old content.
    """
    refuse_replacing(path)
    import tempfile  # imported late: as slow as the parser of specs

    mode = stat.S_IMODE(path.stat().st_mode) & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=".dsc-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0o077)  # it can only be read by setting it
    os.umask(mask)
    return mask


def _resolved(path: Path) -> Path:
    """The path with links resolved, if it is a file or could become one; devices and pipes stay as named."""
    try:
        return path if _is_special(path) else Path(os.path.realpath(path))
    except ValueError:  # a NUL character
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None


def _is_special(path: Path) -> bool:
    return status(path) is not None and not is_file(path) and not is_folder(path)


def _names(argument: str) -> tuple[str, ...]:
    """The file names that an argument SPEC or SPEC:RUN may mean."""
    return argument, argument.rpartition(":")[0] or argument


def _same(a: Path, b: str) -> bool:
    one, other = status(a), status(b)
    return one is not None and other is not None and os.path.samestat(one, other)


# --- Output folders of commands: a new folder appears only when it is complete


@contextmanager
def new_folder(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a temporary folder and a function that moves it to `out`. Without that call the folder is removed.

    Raises FileExistsError if `out` is not empty or not a folder, and other OSErrors if it cannot be written.
    """
    place = out.absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new, lambda: put_folder(new, place)
