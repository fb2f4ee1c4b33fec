"""Reading and writing files of a run folder: only regular files, without following planted links.

Opening a pipe or a device could block. Following a link would let anyone with write access to the folder choose a file
of the user to be overwritten.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 64 << 20  # largest file that is read at once


def open_regular(path: Path, flags: int, *, follow: bool = False) -> int:
    """Open a regular file and return its descriptor. OSError for pipes, devices, folders, and links unless `follow`."""
    extra_flags = os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    file = os.open(path, flags | extra_flags, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. Links are followed. OSError if it has more than `max_bytes` bytes."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow=True), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes >> 20} MiB", str(path))
    return content


def write(path: Path, content: str | bytes) -> None:
    """Replace a file atomically (text as UTF-8): a reader sees the old or the new content. An OSError keeps the old
    one.

    A link is replaced by a file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by a killed writer, or a link
    try:
        with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
