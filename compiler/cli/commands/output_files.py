"""Files that commands write for the user: a new one not over another, an old one replaced in one step."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler.emit.folder import put_folder

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH  # where nobody may write, the superuser was not meant to either
SPEC = ".dsc"


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises FileExistsError, also for a link, and other OSErrors."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)


def refuse_output(path: Path, *read: str | Path | None) -> None:
    """Raise, before the work, the OSError with which `write` would refuse a place. Refuse also a place that is one of
    the files `read` (SPEC or SPEC:RUN), or that has the name of a spec."""
    if path.suffix == SPEC or any(_same(path, name) for each in read if each for name in _names(str(each))):
        raise FileExistsError(errno.EEXIST, "it is what is read, or a spec: name another file", str(path))
    if is_folder(path):
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file in it", str(path))
    place = _behind(path)
    if _is_special(place):
        return
    refuse_replacing(place)
    import tempfile

    with tempfile.TemporaryFile(prefix=".dsc-", dir=place.parent):  # a folder that is there, and takes files
        pass


def put(contents: str, path: Path | None) -> None:
    """Write contents to a file like `write`, or to stdout."""
    if path is None:
        print(contents, end="")
    else:
        write(path, contents.encode())


def write(path: Path, content: bytes) -> None:
    """Write a file, or replace it in one step, behind links too; into a pipe or a device what they take.

    Raises OSError as `replace` does, and for a pipe that nobody reads, which is not waited for.
    """
    place = _behind(path)
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
    """The status of a file or a folder; None where there is none, or where no file can have this name."""
    try:
        return Path(path).stat()
    except (OSError, ValueError):
        return None


def is_file(path: str | Path) -> bool:
    """Whether a path, with links followed, is a file."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: str | Path) -> bool:
    """Whether a path, with links followed, is a folder."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def refuse_replacing(path: Path) -> None:
    """Raise the OSError with which `replace` refuses to touch what is there."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    if not path.exists():
        return
    found = path.stat()
    if not found.st_mode & WRITABLE or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    if found.st_nlink > 1:
        raise OSError(errno.EMLINK, f"it has {found.st_nlink} names (hard links), which would part", str(path))


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, in one step, with its permissions.

    Raises OSError: FileExistsError where the place is taken by what is no file, or is a link; others where the file
    is read-only, though its folder is not, or has several names, of which the others would keep the old text.
    """
    refuse_replacing(path)
    import tempfile  # takes as long as the parser of specs

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


def _behind(path: Path) -> Path:
    """What a link leads to, as far as it is a file or could become one; a device or a pipe as it was named."""
    try:
        return path if _is_special(path) else Path(os.path.realpath(path))
    except ValueError:  # a NUL in it
        raise OSError(errno.EINVAL, "no file can be called so", str(path)) from None


def _is_special(path: Path) -> bool:
    return status(path) is not None and not is_file(path) and not is_folder(path)


def _names(given: str) -> tuple[str, ...]:
    """Names that the file of SPEC or SPEC:RUN may have."""
    return given, given.rpartition(":")[0] or given


def _same(a: Path, b: str) -> bool:
    one, other = status(a), status(b)
    return one is not None and other is not None and os.path.samestat(one, other)


# --- A folder that a command writes for the user: a new one, which appears when it is complete


@contextmanager
def new_folder(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder to write into, and what moves it to `out`. Without that nothing is left of it.

    FileExistsError where `out` has anything in it, or is no folder; other OSErrors where it cannot be written.
    """
    place = out.absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new, lambda: put_folder(new, place)
