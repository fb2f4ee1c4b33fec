"""Where a picture goes: a file or stdout. Imports nothing, so that commands that draw nothing pay nothing."""

from __future__ import annotations

import sys
from pathlib import Path


class TooMuchError(ValueError):
    """A picture that its format, or a terminal, does not take; the message says what to change."""


def put(contents: str | bytes, output: Path | None) -> None:
    """Into a file, or to stdout; TooMuchError for bytes on a terminal, OSError from files."""
    data = contents.encode("utf-8") if isinstance(contents, str) else contents
    if output is not None:
        output.write_bytes(data)
    elif isinstance(contents, str):
        print(contents, end="")
    elif sys.stdout.isatty():
        raise TooMuchError("a picture of bytes would only disturb this terminal: give a file with -o FILE")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
