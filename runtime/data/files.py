"""Errors about data that a user can correct, missing libraries, and safe opening of files."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from difflib import get_close_matches
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

from runtime.system.outcome import printable

# --- What the user must mend about the data: exceptions whose messages name the file


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


# --- Libraries that only some data needs: the extra `data` of the package

INSTALL = 'pip install "dsc-trainer[data]"'


def extra(name: str, purpose: str) -> Any:
    """A module of the extra. Raises DataError that says what it is for and how to install it, where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DataError(f"{purpose}, {error.name} has to be installed: {INSTALL}") from None


# --- Files that may be anything: a pipe or a device in the place of a file is refused, where opening it would wait

MAX_NEAR = 500  # files that are looked at for one that may be meant


def open_regular(path: Path) -> BufferedReader:
    """`path`, opened for reading. Raises DataError if it is no regular file, OSError if it cannot be opened."""
    return os.fdopen(descriptor_of_regular(path, os.O_RDONLY), "rb")


def descriptor_of_regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file, opened with `flags` of os.open (and mode rw-rw-rw- if it is created)."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path}: not a regular file")
    return descriptor


def near(path: Path) -> str:
    """Return "; did you mean …?" with the file nearest in name to one that is missing, or "" where none is near."""
    folder = next((each for each in path.parents if each.is_dir()), None)
    if folder is None:
        return ""
    names = (folder.glob(f"{depth}{path.name}") for depth in ("", "*/", "*/*/"))
    found = [*islice(chain.from_iterable((*names, folder.glob(f"*{path.suffix}"))), MAX_NEAR)]
    close = get_close_matches(str(path), map(str, found), n=1, cutoff=0.6) or [str(each) for each in found[:1]]
    return f"; did you mean {close[0]}?" if close else ""


def fingerprint(path: Path) -> dict[str, Any]:
    """{"bytes": size, "sha256": digest} of a regular file."""
    with open_regular(path) as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a new file, text in UTF-8, and wait until it is on the disk."""
    with path.open("xb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
