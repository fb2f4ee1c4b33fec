"""The files of a source.

A source is `python_stdlib`, a folder, or a glob relative to the spec's folder (`corpus/**/*.jsonl`).
runtime/data/readers.py reads the files.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.data.files import DataError, MissingError, open_regular
from runtime.data.readers import BOM, COLUMN, SUFFIXES, TEXT_SUFFIXES, SourceFile, read_text, suffix_of

STDLIB = "python_stdlib"

# Installed packages are below the same folder. Tests are 58% of the stdlib's bytes (31.5 → 12.1 MB without them,
# 14.2 → 5.3 s to train a BPE of 4096 and encode, one core), mostly tables of data, and many distributions omit them.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_GLOB = frozenset("*?[")
_ROOT, _OF_KERNEL = Path("/"), frozenset({"dev", "proc", "sys"})
OTHER_SUFFIX = "other suffix"
INDEX = ".idx"
TOKEN_SUFFIXES = (INDEX, ".bin")
MAX_SHOWN = 4  # suffixes
MAX_STATE_BYTES = 16 << 20
_OF_DATASETS = frozenset({"state.json", "dataset_info.json"})  # beside its .arrow files


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files in the order of names. `skipped`: (reason, number) of files and linked folders that are not read."""

    files: tuple[SourceFile, ...]
    skipped: tuple[tuple[str, int], ...]


# ---------------------------------------------------------------- finding


def find(source: str, spec_folder: Path, suffixes: Sequence[str] = SUFFIXES, column: str = COLUMN) -> Corpus:
    """Find the files of a source that have one of the suffixes. Symbolic links below its folder are not followed, so
    all files are inside it, and hidden files are included only if the source names them.

    Raises DataError that names the folder and the pattern if nothing is found.
    """
    folder, paths, names_hidden = _match_source(source, spec_folder)
    files: list[SourceFile] = []
    left_out: dict[Path, str] = {}
    for path in paths:
        if reason := _exclusion_reason(folder, path, suffixes, names_hidden=names_hidden):
            left_out[path] = reason
        else:
            files.append(SourceFile(path.relative_to(folder).as_posix(), path, column))
    if not files:
        kind = DataError if left_out else MissingError
        raise kind(_nothing_found(source, folder, left_out, suffixes))
    return Corpus(tuple(sorted(files)), _count_by_reason(left_out))


def find_by_name(source: str, spec_folder: Path, suffixes: Sequence[str] = SUFFIXES) -> Corpus:
    """Find the files of a source by name alone. No file is opened, so `find` may leave some of them out.

    Raises DataError if the source is no pattern.
    """
    folder, paths, names_hidden = _match_source(source, spec_folder)
    reasons = {path: _exclusion_reason_by_name(folder, path, suffixes, names_hidden=names_hidden) for path in paths}
    files = (SourceFile(path.relative_to(folder).as_posix(), path) for path, reason in reasons.items() if not reason)
    return Corpus(tuple(sorted(files)), _count_by_reason({path: reason for path, reason in reasons.items() if reason}))


def note_on_skipped(source: str, num_files: int, skipped: Mapping[str, int]) -> str:
    """Return a note on the matching files that are not read, and why; "" if all are read.

    num_files: number of files that are read. skipped: number of other files by reason.
    """
    if not (num_skipped := sum(skipped.values())):
        return ""
    reasons = "; ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
    return f"{num_skipped:,} of {num_files + num_skipped:,} files of {source!r} are not read: {reasons}"


def note_on_shared(files: Mapping[str, Sequence[SourceFile]]) -> str:
    """Return a note on the files that are in several sources of a blend; "" if there are none. `files`: by source."""
    owners: dict[Path, list[str]] = {}
    for name, source_files in files.items():
        for file in source_files:
            owners.setdefault(file.path.resolve(), []).append(name)
    shared = {path: names for path, names in owners.items() if len(names) > 1}
    if not shared:
        return ""
    path, names = min(shared.items())
    return (
        f"files in several sources of the blend: {len(shared):,}, such as {path} in {' and '.join(names)}: what one "
        "source holds out may be trained on in another"
    )


def _match_source(source: str, spec_folder: Path) -> tuple[Path, list[Path], bool]:
    """Return the folder of a source, the matching files and linked folders, and whether the source names hidden
    ones."""
    if source == STDLIB:
        return stdlib_folder(), _stdlib_paths(), False
    folder, pattern = _split_glob(source, spec_folder)
    paths = [path for path in _matches(source, folder, pattern) if path.is_symlink() or not path.is_dir()]
    saved = {path.parent for path in paths if path.suffix == ".arrow"}
    paths = [path for path in paths if not (path.name in _OF_DATASETS and path.parent in saved)]
    return folder, paths, any(part.startswith(".") for part in Path(pattern).parts)


def _count_by_reason(left_out: Mapping[Path, str]) -> tuple[tuple[str, int], ...]:
    """Return (reason, number) of files that are left out. The reason for other suffixes lists some of them."""
    counts = Counter(left_out.values())
    if number := counts.pop(OTHER_SUFFIX, 0):
        counts[f"{OTHER_SUFFIX} ({_join_suffixes(_other_suffixes(left_out))})"] = number
    return tuple(sorted(counts.items()))


def _other_suffixes(left_out: Mapping[Path, str]) -> list[str]:
    return sorted({_suffix(path) or "no suffix" for path, why in left_out.items() if why == OTHER_SUFFIX})


def _join_suffixes(suffixes: Sequence[str]) -> str:
    return ", ".join(suffixes[:MAX_SHOWN]) + " and others" * (len(suffixes) > MAX_SHOWN)


def token_files(source: str, spec_folder: Path) -> tuple[Path, ...]:
    """Return the token files of a source in the order of names, without suffixes: `NAME` stands for NAME.idx and
    NAME.bin unless it matches something else. Empty if the source is text. DataError if the files do not exist."""
    if source == STDLIB or "\0" in source or (spec_folder / source).is_dir():
        return ()
    named = next((suffix for suffix in TOKEN_SUFFIXES if source.endswith(suffix)), "")
    folder, pattern = _split_glob(source, spec_folder)
    if not named and _matches(source, folder, pattern):
        return ()
    matches = _matches(source, folder, pattern.removesuffix(named) + INDEX)
    prefixes = tuple(path.with_name(path.name.removesuffix(INDEX)) for path in sorted(matches))
    if named and not prefixes:
        raise MissingError(f"data source {source!r}: no file of token ids, {INDEX} and .bin, found in {folder}")
    return prefixes


def reason_for_no_files(source: str, spec_folder: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Return why `find` would raise, or "". Stops at the first file that is found."""
    try:
        if source == STDLIB or token_files(source, spec_folder):
            return ""
        folder, paths, names_hidden = _match_source(source, spec_folder)
        if any(not _exclusion_reason(folder, path, suffixes, names_hidden=names_hidden) for path in paths):
            return ""
        find(source, spec_folder, suffixes)
    except (DataError, OSError) as error:
        return str(error)
    return ""


def stdlib_folder() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_paths() -> list[Path]:
    folder = stdlib_folder()
    return [p for p in folder.rglob("*.py") if _NOT_STDLIB.isdisjoint(p.relative_to(folder).parts)]


def _split_glob(source: str, spec_folder: Path) -> tuple[Path, str]:
    """Split a source before the first component with a wildcard. Names of files are relative to that folder. A source
    that is a folder stands for all files in it."""
    if not source or "\0" in source:
        raise DataError(f"data source {source!r}: expected {STDLIB} or a pattern such as corpus/*.jsonl")
    parts = Path(source).parts
    if not Path(source).name or parts[-1] == "..":
        raise DataError(f"data source {source!r}: this is a folder, write {source.rstrip('/')}/**/*.txt")
    first = next((i for i, part in enumerate(parts) if _GLOB & set(part)), len(parts) - 1)
    if ".." in parts[first:]:
        raise DataError(f"data source {source!r}: `..` cannot follow a wildcard")
    folder = spec_folder.joinpath(*parts[:first])
    if not _GLOB & set(parts[-1]) and (folder / parts[-1]).is_dir():
        _check_splits(source, folder / parts[-1])
        return folder / parts[-1], "**/*"
    return folder, "/".join(parts[first:])


def _check_splits(source: str, folder: Path) -> None:
    """Raise DataError for a folder of several data sets (a DatasetDict of `datasets`), because one of them may be for
    tests."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(
            f"data source {source!r}: a folder with the splits {', '.join(splits)}: name one of them, as in "
            f"{source.rstrip('/')}/{splits[0] if splits else 'train'}"
        )


def _matches(source: str, folder: Path, pattern: str) -> list[Path]:
    try:
        if not folder.is_dir():
            return []
        return list(dict.fromkeys(path for root, part in _search_roots(folder, pattern) for path in root.glob(part)))
    except (ValueError, NotImplementedError) as error:  # `**.txt`, an empty pattern
        raise DataError(f"data source {source!r}: {error}") from None
    except OSError as error:
        raise DataError(f"data source {source!r}: {error.filename} cannot be listed: {error.strerror}") from None


def _search_roots(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield folders and the patterns to match below them. Leaves out the virtual files of the kernel below /, which
    belong to processes and devices."""
    first, _, remainder = pattern.partition("/")
    if first != "**" or not remainder or folder.resolve() != _ROOT:
        yield folder, pattern
        return
    yield folder, remainder
    for child in sorted(folder.iterdir()):
        if child.name not in _OF_KERNEL and child.is_dir() and not child.is_symlink():
            yield child, pattern


def _exclusion_reason(folder: Path, path: Path, suffixes: Sequence[str], *, names_hidden: bool) -> str:
    """Return why a match is left out, or ""."""
    if reason := _exclusion_reason_by_name(folder, path, suffixes, names_hidden=names_hidden):
        return reason
    suffix = suffix_of(path, suffixes)
    if suffix == ".arrow" and not _is_of_dataset(path):
        return "not listed in the state.json beside it"
    return "" if suffix not in TEXT_SUFFIXES or _decodes(path) else "not UTF-8"


def _exclusion_reason_by_name(folder: Path, path: Path, suffixes: Sequence[str], *, names_hidden: bool) -> str:
    """Return why a match is left out, as far as its name and type tell, or ""."""
    parts = path.relative_to(folder).parts
    if any(part.is_symlink() for part in (path, *path.parents[: len(parts) - 1])):
        return "symbolic link"
    if not names_hidden and any(part.startswith(".") for part in parts):
        return "hidden"
    if not suffix_of(path, suffixes):
        return OTHER_SUFFIX
    return "" if path.is_file() else "not a file"


def _decodes(path: Path) -> bool:
    try:
        read_text(path)
    except UnicodeDecodeError:
        return False
    return True


def _is_of_dataset(path: Path) -> bool:
    """Whether an Arrow file belongs to the data set that `datasets` saved in its folder, and is no cache of a `map`."""
    state = path.with_name("state.json")
    if not state.is_file():
        return True
    try:
        with open_regular(state) as stream:
            saved = json.loads(stream.read(MAX_STATE_BYTES))
        names = [str(file["filename"]) for file in saved["_data_files"]]
        indices = saved.get("_indices_data_files") or saved.get("_indices_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{state}: not a state.json of `datasets`: {error}") from None
    if indices:
        raise DataError(f"{state}: rows are chosen by indices; call flatten_indices() before save_to_disk()")
    return path.name in names


def _nothing_found(source: str, folder: Path, left_out: Mapping[Path, str], allowed: Sequence[str]) -> str:
    """Return an error message: what the pattern matched, and why none of it is read."""
    start = f"data source {source!r}: "
    if left_out:
        count = len(left_out)
        matched = "1 file matches and is not read" if count == 1 else f"{count} files match and none is read"
        return f"{start}{matched}: {'; '.join(_reasons(left_out, allowed))}"
    return f"{start}no {', '.join(allowed)} file found in {folder}"


def _reasons(left_out: Mapping[Path, str], allowed: Sequence[str]) -> Iterator[str]:
    for reason, count in sorted(Counter(left_out.values()).items()):
        if reason == OTHER_SUFFIX:
            suffixes = _other_suffixes(left_out)
            verb = "is" if len(suffixes) == 1 else "are"
            edit = "rename the files, or write their texts as lines of a .jsonl"
            if ".parquet" in suffixes:
                edit = "parquet files are not read here: write their rows as lines of a .jsonl"
            yield f"{_join_suffixes(suffixes)} {verb} not one of {' '.join(allowed)}; {edit}"
        else:
            yield f"{count} left out: {reason}"


def _suffix(path: Path) -> str:
    """Return the suffix of a file, with the one before it if the file is compressed."""
    return "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix


# ---------------------------------------------------------------- contents


def digest(files: tuple[SourceFile, ...]) -> str:
    """Return the sha256 of names, contents and columns. Equal corpora in different folders have equal digests."""
    total = hashlib.sha256()
    if columns := sorted({file.column for file in files} - {COLUMN}):
        total.update(f"{columns}\n".encode())
    for file in files:
        with open_regular(file.path) as stream:
            if file.is_one_document and stream.read(len(BOM)) != BOM:  # the byte order mark is no part of the text
                stream.seek(0)
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{file.name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
