"""Reading and writing the files of a run folder: regular files alone, and never through a link that somebody put there.

A pipe or a device in the place of a file would be waited for. A link would let whoever can write to the folder choose
which file of the user is overwritten.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 64 << 20  # of a file that is read whole


def open_regular(path: Path, flags: int, *, follow: bool = False) -> int:
    """Descriptor of a regular file; OSError for pipes, devices and folders, and for links unless `follow`."""
    more = os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    file = os.open(path, flags | more, 0o644)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a regular file, or of one that a link leads to. OSError if it has more than `most` bytes."""
    with os.fdopen(open_regular(path, os.O_RDONLY, follow=True), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return content


def write(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, text in UTF-8: a reader sees the old or the new content. OSError leaves the old one.

    A link in the place of the file is replaced too.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of a writer that was killed, or a link
    try:
        with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
