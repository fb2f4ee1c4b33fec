"""Files that commands write for the user: a new one not over another, an old one replaced in one step."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH  # where nobody may write, the superuser was not meant to either


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet. Raises FileExistsError, also for a link, and other OSErrors."""
    with path.open("x", encoding="utf-8", newline="\n") as file:
        file.write(text)


def refuse_replacing(path: Path) -> None:
    """Raise the OSError with which `replace` refuses to touch what is there."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    if not path.exists():
        return
    status = path.stat()
    if not status.st_mode & WRITABLE or not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "it is read-only", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, f"it has {status.st_nlink} names (hard links), which would part", str(path))


def replace(path: Path, content: bytes) -> None:
    """Put a new file in the place of an old one, in one step, with its permissions.

    Raises OSError: FileExistsError where the place is taken by what is no file, or is a link; others where the file
    is read-only, though its folder is not, or has several names, of which the others would keep the old text.
    """
    refuse_replacing(path)
    import tempfile  # takes as long as the parser of specs

    mode = stat.S_IMODE(path.stat().st_mode) & 0o777 if path.exists() else 0o644
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
