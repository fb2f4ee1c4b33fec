"""Errors in data that a user can correct, missing libraries, and safe opening of files."""

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

# --- Errors that the user must fix: exceptions whose messages name the file


class DataError(ValueError):
    """The corpus, the tokenizer or a shard cannot be used.

    Its message has names and contents of files, so it is made safe for a terminal here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingError(DataError):
    """A path of a spec does not exist. Perhaps it should be relative to another folder."""


def path_start_hint(folder: Path) -> str:
    """Return a hint on where paths of a spec start, and how to name another folder."""
    return printable(f"paths of the spec start at {folder.absolute()}; `--data DIR` names another folder")


# --- Optional libraries: the extra `data` of the package

INSTALL = 'pip install "dsc-trainer[data]"'


def import_extra(name: str, purpose: str) -> Any:
    """Import a module of the extra. If it is missing, raises DataError with its purpose and how to install it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise DataError(f"{purpose}, {error.name} has to be installed: {INSTALL}") from None


# --- Opening untrusted paths: pipes and devices are refused, because opening them could block

MAX_NEAR = 500  # files to consider for a suggestion


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Raises DataError if it is no regular file, OSError if it cannot be opened."""
    return os.fdopen(descriptor_of_regular(path, os.O_RDONLY), "rb")


def descriptor_of_regular(path: Path, flags: int) -> int:
    """Open a regular file with `flags` of os.open and return its descriptor. A created file has mode rw-rw-rw-."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DataError(f"{path}: not a regular file")
    return descriptor


def closest_name_hint(path: Path) -> str:
    """Return "; did you mean …?" with the file whose name is closest to a missing one, or "" if none is close."""
    folder = next((parent for parent in path.parents if parent.is_dir()), None)
    if folder is None:
        return ""
    names = (folder.glob(f"{depth}{path.name}") for depth in ("", "*/", "*/*/"))
    candidates = [*islice(chain.from_iterable((*names, folder.glob(f"*{path.suffix}"))), MAX_NEAR)]
    close = get_close_matches(str(path), map(str, candidates), n=1, cutoff=0.6) or [
        str(candidate) for candidate in candidates[:1]
    ]
    return f"; did you mean {close[0]}?" if close else ""


def fingerprint(path: Path) -> dict[str, Any]:
    """Return {"bytes": size, "sha256": digest} of a regular file."""
    with open_regular(path) as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def write_and_sync(path: Path, content: str | bytes) -> None:
    """Write a new file (text as UTF-8), and sync it to disk."""
    with path.open("xb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
