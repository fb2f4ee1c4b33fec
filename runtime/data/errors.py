"""What the user must mend about the data: exceptions whose messages name the file."""

from __future__ import annotations

from pathlib import Path

from runtime.system.outcome import printable


class DataError(ValueError):
    """The corpus, the tokenizer or a shard cannot be used as given.

    Names of files and parts of their contents are in the message, so it is made safe for a terminal here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingError(DataError):
    """Nothing is where a path of a spec says: its paths may start at another folder."""


def where_paths_start(folder: Path) -> str:
    """Say where paths of a spec are looked for, and how to name another folder."""
    return printable(f"paths of the spec start at {folder.absolute()}; `--data DIR` names another folder")
