"""A picture on stdout. Imports nothing, so that commands that draw nothing pay nothing."""

from __future__ import annotations

import sys


class TooMuchError(ValueError):
    """A picture that its format, or a terminal, does not take; the message says what to change."""


def to_stdout(contents: str | bytes) -> None:
    """TooMuchError for bytes on a terminal."""
    if isinstance(contents, str):
        print(contents, end="")
    elif sys.stdout.isatty():
        raise TooMuchError("a picture of bytes would only disturb this terminal: give a file with -o FILE")
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(contents)
        sys.stdout.buffer.flush()
