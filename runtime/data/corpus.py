"""The documents of a source.

A source is `python_stdlib` or a glob relative to the spec's folder (`corpus/**/*.jsonl`). A `.txt`, `.md` or `.py` file
is one document; a `.jsonl` file has one a line, under the key "text".
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError
from runtime.data.files import open_regular

STDLIB = "python_stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl")
MAX_DOCUMENT_BYTES = 64 << 20

# Other people's packages live below the same folder; tests are 58% of the stdlib's bytes (31.5 → 12.1 MB without them,
# 14.2 → 5.3 s to train a BPE of 4096 and encode, one core), mostly tables of data, and many distributions omit them.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_GLOB = frozenset("*?[")
OTHER_SUFFIX = "other suffix"
MAX_SHOWN = 4  # suffixes


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """A file of the corpus. `name` is relative to the source's folder, with `/`."""

    name: str
    path: Path

    @property
    def is_one_document(self) -> bool:
        return self.path.suffix != ".jsonl"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in the order of their names. `skipped`: (reason, number of files) that matched but are not read."""

    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, int], ...]


# ---------------------------------------------------------------- finding


def find(source: str, spec_folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Corpus:
    """The corpus `source` names, of files with one of the suffixes. Symbolic links below its folder are not followed,
    so no file comes from elsewhere.

    Raises DataError when nothing is found, naming the folder and the pattern.
    """
    if source == STDLIB:
        folder, paths = stdlib_folder(), _stdlib_paths()
    else:
        folder, pattern = _split_glob(source, spec_folder)
        paths = _matches(source, folder, pattern)
    files: list[SourceFile] = []
    left_out: dict[Path, str] = {}
    for path in paths:
        if path.is_dir():
            continue
        if reason := _why_not(folder, path, suffixes):
            left_out[path] = reason
        else:
            files.append(SourceFile(path.relative_to(folder).as_posix(), path))
    if not files:
        raise DataError(_nothing_found(source, folder, left_out, suffixes))
    return Corpus(tuple(sorted(files)), tuple(sorted(Counter(left_out.values()).items())))


def why_nothing(source: str, spec_folder: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Why `find` would raise, or "" where it finds a file: it is only looked for one, not at all of them."""
    try:
        if source == STDLIB:
            return ""
        folder, pattern = _split_glob(source, spec_folder)
        paths = _matches(source, folder, pattern)
        if any(not path.is_dir() and not _why_not(folder, path, suffixes) for path in paths):
            return ""
        find(source, spec_folder, suffixes)
    except (DataError, OSError) as error:
        return str(error)
    return ""


def stdlib_folder() -> Path:
    """Where the running Python keeps the sources of its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_paths() -> list[Path]:
    folder = stdlib_folder()
    return [p for p in folder.rglob("*.py") if _NOT_STDLIB.isdisjoint(p.relative_to(folder).parts)]


def _split_glob(source: str, spec_folder: Path) -> tuple[Path, str]:
    """The folder before the first component with a wildcard, and the rest: names do not depend on where it lies."""
    if not source or "\0" in source:
        raise DataError(f"data source {source!r}: expected {STDLIB} or a pattern such as corpus/*.jsonl")
    parts = Path(source).parts
    if not Path(source).name or parts[-1] == "..":
        raise DataError(f"data source {source!r}: this is a folder, write {source.rstrip('/')}/**/*.txt")
    first = next((i for i, part in enumerate(parts) if _GLOB & set(part)), len(parts) - 1)
    if ".." in parts[first:]:
        raise DataError(f"data source {source!r}: `..` cannot follow a wildcard")
    return spec_folder.joinpath(*parts[:first]), "/".join(parts[first:])


def _matches(source: str, folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern)) if folder.is_dir() else []
    except (ValueError, NotImplementedError) as error:  # `**.txt`, an empty pattern
        raise DataError(f"data source {source!r}: {error}") from None


def _why_not(folder: Path, path: Path, suffixes: Sequence[str]) -> str:
    """Why a match is left out, or ""."""
    below = len(path.relative_to(folder).parts)
    if any(part.is_symlink() for part in (path, *path.parents[: below - 1])):
        return "symbolic link"
    if path.suffix not in suffixes:
        return OTHER_SUFFIX
    if not path.is_file():
        return "not a file"
    return "" if path.suffix == ".jsonl" or _decodes(path) else "not UTF-8"


def _decodes(path: Path) -> bool:
    try:
        _read(path)
    except UnicodeDecodeError:
        return False
    return True


def _nothing_found(source: str, folder: Path, left_out: Mapping[Path, str], allowed: Sequence[str]) -> str:
    """What the pattern matched, and why none of it is read."""
    start = f"data source {source!r}: "
    if left_out:
        count = len(left_out)
        matched = "1 file matches and is not read" if count == 1 else f"{count} files match and none is read"
        return f"{start}{matched}: {'; '.join(_reasons(left_out, allowed))}"
    if (folder / Path(source).name).is_dir():
        return f"{start}{source} is a folder, write {source.rstrip('/')}/**/*{allowed[0]}"
    return f"{start}no {', '.join(allowed)} file found in {folder}"


def _reasons(left_out: Mapping[Path, str], allowed: Sequence[str]) -> Iterator[str]:
    for reason, count in sorted(Counter(left_out.values()).items()):
        if reason == OTHER_SUFFIX:
            suffixes = sorted({path.suffix or "no suffix" for path, why in left_out.items() if why == reason})
            more = " and others" if len(suffixes) > MAX_SHOWN else ""
            verb = "is" if len(suffixes) == 1 else "are"
            edit = "rename the files, or write their texts as lines of a .jsonl"
            if ".parquet" in suffixes:
                edit = "parquet files are not read: write their rows as lines of a .jsonl"
            yield f"{', '.join(suffixes[:MAX_SHOWN])}{more} {verb} not one of {' '.join(allowed)}; {edit}"
        else:
            yield f"{count} left out: {reason}"


# ---------------------------------------------------------------- reading


def documents(file: SourceFile) -> Iterator[str]:
    """The documents of one file, empty ones left out. Raises DataError with file and line for a bad `.jsonl`."""
    texts = iter((_read(file.path),)) if file.is_one_document else _jsonl(file.path)
    return (text for text in texts if text)


def _read(path: Path) -> str:
    with open_regular(path) as stream:
        content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{path}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB; write documents as lines of a .jsonl")
    return content.decode("utf-8")


def _jsonl(path: Path) -> Iterator[str]:
    for place, _, row in json_lines(path):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise DataError(f'{place}: expected an object with a string under "text"')
        text: str = row["text"]
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise DataError(f'{place}: "text" holds half of a surrogate pair, which no UTF-8 text has')
        yield text


def json_lines(path: Path) -> Iterator[tuple[str, bytes, Any]]:
    """(file:line, bytes, value) of every line that is not blank. Raises DataError for one that is not JSON."""
    with open_regular(path) as lines:
        number = 0
        while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{place}: line longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place}: not JSON: {error}") from None
                yield place, line.strip(), value


def digest(files: tuple[SourceFile, ...]) -> str:
    """sha256 over names and contents: equal corpora in different places are equal."""
    total = hashlib.sha256()
    for file in files:
        with open_regular(file.path) as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
