"""The documents of a source, and which of its files are held out for validation.

A source is `python_stdlib` or a glob relative to the spec's folder (`corpus/**/*.jsonl`). A `.txt`, `.md` or `.py` file
is one document; a `.jsonl` file has one a line, under the key "text". Files are the unit of the split, whole.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.data.errors import DataError

STDLIB = "python_stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl")
MAX_DOCUMENT_BYTES = 64 << 20

# Other people's packages live below the same folder; tests are 58% of the stdlib's bytes (31.5 → 12.1 MB without them,
# 14.2 → 5.3 s to train a BPE of 4096 and encode, one core), mostly tables of data, and many distributions omit them.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_GLOB = frozenset("*?[")


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """A file of the corpus. `name` is relative to the source's folder, with `/`, and decides the split."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in the order of their names. `skipped`: (reason, number of files) that matched but are not read."""

    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The same files, divided; each part in the order of names."""

    train: tuple[SourceFile, ...]
    validation: tuple[SourceFile, ...]


# ---------------------------------------------------------------- finding


def find(source: str, spec_folder: Path) -> Corpus:
    """The corpus `source` names. Symbolic links below its folder are not followed, so no file comes from elsewhere.

    Raises DataError when nothing is found, naming the folder and the pattern.
    """
    if source == STDLIB:
        folder, paths = stdlib_folder(), _stdlib_paths()
    else:
        folder, pattern = _split_glob(source, spec_folder)
        paths = _matches(source, folder, pattern)
    files: list[SourceFile] = []
    skipped: dict[str, int] = {}
    for path in paths:
        if path.is_dir():
            continue
        if reason := _why_not(folder, path):
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            files.append(SourceFile(path.relative_to(folder).as_posix(), path))
    corpus = Corpus(tuple(sorted(files)), tuple(sorted(skipped.items())))
    if not corpus.files:
        raise DataError(_nothing_found(source, folder, corpus))
    return corpus


def why_nothing(source: str, spec_folder: Path) -> str:
    """Why `find` would raise, or "" where it finds a file: it is only looked for one, not at all of them."""
    try:
        if source == STDLIB:
            return ""
        folder, pattern = _split_glob(source, spec_folder)
        if any(not path.is_dir() and not _why_not(folder, path) for path in _matches(source, folder, pattern)):
            return ""
        find(source, spec_folder)
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


def _why_not(folder: Path, path: Path) -> str:
    """Why a match is left out, or ""."""
    below = len(path.relative_to(folder).parts)
    if any(part.is_symlink() for part in (path, *path.parents[: below - 1])):
        return "symbolic link"
    if path.suffix not in SUFFIXES:
        return "other suffix"
    if not path.is_file():
        return "not a file"
    return "" if path.suffix == ".jsonl" or _decodes(path) else "not UTF-8"


def _decodes(path: Path) -> bool:
    try:
        _read(path)
    except UnicodeDecodeError:
        return False
    return True


def _nothing_found(source: str, folder: Path, corpus: Corpus) -> str:
    reasons = ", ".join(f"{count} left out: {reason}" for reason, count in corpus.skipped)
    hint = f"; {reasons}" if reasons else ""
    if (folder / Path(source).name).is_dir():
        hint = f"; {source} is a folder, write {source.rstrip('/')}/**/*.txt"
    return f"data source {source!r}: no {', '.join(SUFFIXES)} file found in {folder}{hint}"


# ---------------------------------------------------------------- reading


def documents(file: SourceFile) -> Iterator[str]:
    """The documents of one file, empty ones left out. Raises DataError with file and line for a bad `.jsonl`."""
    texts = _jsonl(file.path) if file.path.suffix == ".jsonl" else iter((_read(file.path),))
    return (text for text in texts if text)


def _read(path: Path) -> str:
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise DataError(f"{path}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB; write documents as lines of a .jsonl")
    return path.read_bytes().decode("utf-8")


def _jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{path}:{number}: line longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if line.strip():
                yield _json_text(line, f"{path}:{number}")


def _json_text(line: bytes, place: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f'{place}: expected an object with a string under "text"')
    text: str = row["text"]
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f'{place}: "text" holds half of a surrogate pair, which no UTF-8 text has')
    return text


def digest(files: tuple[SourceFile, ...]) -> str:
    """sha256 over names and contents: equal corpora in different places are equal."""
    total = hashlib.sha256()
    for file in files:
        with file.path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


# ---------------------------------------------------------------- split


def split(files: tuple[SourceFile, ...], fraction: float, seed: int) -> Split:
    """Holds out whole files: those whose hash of (seed, name) lies below `fraction` of its range.

    A file stays on its side when others come or go, except that both sides get at least one: where chance left one
    side empty, the file with the lowest (highest) hash is validation (training). A fraction of 0 holds out nothing.
    Raises DataError for a fraction outside [0, 1), or a single file to divide.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"validation = {fraction!r}: expected a fraction of the files, from 0 to below 1")
    if fraction == 0:
        return Split(files, ())
    if len(files) < 2:
        raise DataError(f"{files[0].path}: one file cannot be divided; whole files are held out for validation")
    ranked = sorted(files, key=lambda file: (rank(file.name, seed), file.name))
    num_held = sum(rank(file.name, seed) < fraction * 2**64 for file in files)
    num_held = min(max(num_held, 1), len(files) - 1)
    return Split(tuple(sorted(ranked[num_held:])), tuple(sorted(ranked[:num_held])))


def rank(name: str, seed: int) -> int:
    """A hash of (seed, name), uniform in [0, 2⁶⁴)."""
    text = f"{seed}\0{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
