"""Reading a text file that a user names: bounded, and with a reason where there is none."""

from __future__ import annotations

from pathlib import Path


class TextFileError(ValueError):
    """Why a file cannot be read as text; the message names it."""


def read_text(path: Path, most_bytes: int, shown: str = "") -> str:
    """The text of a file in UTF-8, without a byte order mark. `shown`: what messages call the file, else its path."""
    shown = shown or str(path)
    try:
        if not path.is_file():  # nor a pipe, which would be waited for
            raise TextFileError(f"{shown} is no regular file" if path.exists() else f"there is no file {shown}")
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise TextFileError(f"{shown}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, TextFileError):
            raise
        raise TextFileError(f"there is no file {shown!r}") from None  # a NUL in the path
    if len(data) > most_bytes:
        raise TextFileError(f"{shown} is larger than {most_bytes >> 20} MiB")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise TextFileError(f"{shown} is not text in UTF-8") from None
