"""Output files of commands. A new file never overwrites another; an existing file is replaced atomically."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH  # a file without these bits is read-only for root too
SPEC_SUFFIX = ".dsc"


def write_new(path: Path, text: str) -> None:
    """Write a new file. Raises FileExistsError if the path exists, even as a link, and other OSErrors."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)


def refuse_output(path: Path, *inputs: str | Path | None) -> None:
    """Check that `write` can write to this path; commands call this before they work. Raises the OSError of `write`.

    Also refuses a path with the suffix of a spec, and a path that is one of the `inputs` (arguments SPEC or SPEC:RUN).
    """
    if path.suffix == SPEC_SUFFIX or any(
        _is_same(path, name) for argument in inputs if argument for name in _names(str(argument))
    ):
        raise FileExistsError(errno.EEXIST, "it is an input file or a spec: name another file", str(path))
    if is_folder(path):
        raise IsADirectoryError(errno.EISDIR, "it is a folder: name a file in it", str(path))
    place = _resolve_links(path)
    if _is_special(place):
        return
    refuse_replacing(place)
    with tempfile.TemporaryFile(prefix=".dsc-", dir=place.parent):  # the folder exists and is writable
        pass


def write_or_print(contents: str, path: Path | None) -> None:
    """Write contents to a file with `write`, or to stdout."""
    if path is None:
        print(contents, end="")
    else:
        write(path, contents.encode())


def write(path: Path, content: bytes) -> None:
    """Write a file, replacing an old one atomically and following links. Pipes and devices are written to directly.

    Raises the OSErrors of `replace`. If nobody reads a pipe, raises OSError instead of waiting for a reader.
    """
    place = _resolve_links(path)
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
    """Raise OSError if `replace` must not replace the file at a path."""
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

    Raises FileExistsError if the path is a link or not a regular file. Raises other OSErrors if the file is read-only,
    even in a writable folder, or has several hard links: the other names would keep the old content.
    """
    refuse_replacing(path)
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
    mask = os.umask(0o077)  # a process can read its mask only by setting another
    os.umask(mask)
    return mask


def _resolve_links(path: Path) -> Path:
    """The path with links resolved. The path of a device or pipe is returned unchanged."""
    try:
        return path if _is_special(path) else Path(os.path.realpath(path))
    except ValueError:  # a NUL character
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None


def _is_special(path: Path) -> bool:
    return status(path) is not None and not is_file(path) and not is_folder(path)


def _names(argument: str) -> tuple[str, ...]:
    """The file names that an argument SPEC or SPEC:RUN may mean."""
    return argument, argument.rpartition(":")[0] or argument


def _is_same(path: Path, name: str) -> bool:
    first, second = status(path), status(name)
    return first is not None and second is not None and os.path.samestat(first, second)


# --- Output folders of commands: a new folder appears only when it is complete


@contextmanager
def new_folder(out: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a temporary folder and a function that moves it to `out`. Without that call the folder is removed.

    Raises FileExistsError if `out` is not empty or not a folder, and other OSErrors if it cannot be written.
    """
    from compiler.emit.folder import put_folder  # imports the contents of builds, which commands on specs do not need

    place = out.absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new, lambda: put_folder(new, place)
