"""The documents of one file, by its suffix: text, lines of JSON, or a column of a table.

A document has at most 64 MiB. Compressed lines are read piece by piece, and tables in a process with limits
(runtime/data/tables.py), so a small file that expands without end gives an error and fills no memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, cast

from runtime.data.files import DataError, extra, open_regular

TEXT_SUFFIXES = (".txt", ".md", ".py")
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, *TABLE_SUFFIXES)
MAX_DOCUMENT_BYTES = 64 << 20
COLUMN = "text"
BATCH_BYTES = 1 << 20
BOM = codecs.BOM_UTF8  # before a text in UTF-8, of which it is no part
_WIDE_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # those of UTF-32 begin or end with them


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """A file of the corpus. `name` is relative to the source's folder, with `/`. `column`: where the text of a row is,
    a key of its object or a column of the table. `kept`: a byte for each of its documents, 0 for those that filters
    leave out; None where all are read."""

    name: str
    path: Path
    column: str = COLUMN
    kept: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def is_one_document(self) -> bool:
        return suffix_of(self.path) in TEXT_SUFFIXES


def suffix_of(path: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Which of the suffixes a name ends in, or ""."""
    return next((each for each in suffixes if path.name.endswith(each) and path.name != each), "")


def documents(file: SourceFile) -> Iterator[str]:
    """The documents of one file, empty ones left out. Raises DataError with file and line, or row, for a bad one."""
    suffix = suffix_of(file.path)
    if suffix in LINE_SUFFIXES:
        texts = _texts_of_lines(file.path, file.column)
    elif suffix in TABLE_SUFFIXES:
        from runtime.data.tables import texts_of_table

        texts = texts_of_table(file.path, file.column, MAX_DOCUMENT_BYTES)
    else:
        texts = iter((read_text(file.path),))
    found = (text for text in texts if text)
    return found if file.kept is None else compress(found, file.kept)


Document = tuple[SourceFile, str]
Batch = Sequence[Document]


def batches(files: Iterable[SourceFile], read: Callable[[SourceFile], Iterable[str]]) -> Iterator[list[Document]]:
    """Documents or rows, about BATCH_BYTES at a time: enough to keep every core encoding. `read`: those of a file."""
    batch: list[Document] = []
    held = 0
    for file in files:
        for text in read(file):
            batch.append((file, text))
            held += len(text)
            if held >= BATCH_BYTES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def read_text(path: Path) -> str:
    """A file that is one document. Raises DataError if it is too long, UnicodeDecodeError if it is not UTF-8."""
    with open_regular(path) as stream:
        content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{path}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB; write documents as lines of a .jsonl")
    return content.removeprefix(BOM).decode("utf-8")


def _texts_of_lines(path: Path, column: str) -> Iterator[str]:
    for place, _, row in json_lines(path):
        if not isinstance(row, dict) or not isinstance(row.get(column), str):
            raise DataError(f'{place}: expected an object with a string under "{column}"')
        text: str = row[column]
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise DataError(f'{place}: "{column}" holds half of a surrogate pair, which no UTF-8 text has')
        yield text


def json_lines(path: Path) -> Iterator[tuple[str, bytes, Any]]:
    """(file:line, bytes, value) of every line that is not blank. Raises DataError for one that is not JSON."""
    with _lines(path) as lines:
        number = 0
        while line := _line(lines, f"{path}:{number + 1}"):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{place}: line longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                if b"\0" in line or line.startswith(_WIDE_BOMS):
                    raise DataError(f"{place}: in UTF-16, it seems: write it in UTF-8 (iconv -f UTF-16 -t UTF-8)")
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{place}: not JSON: {error}") from None
                yield place, line.strip(), value


def _line(lines: BinaryIO, place: str) -> bytes:
    try:
        return lines.readline(MAX_DOCUMENT_BYTES + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{place}: cannot be decompressed: {error}") from None


@contextmanager
def _lines(path: Path) -> Iterator[BinaryIO]:
    """What a file holds, decompressed as it is read."""
    with open_regular(path) as stream:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=stream) as found:
                yield cast(BinaryIO, found)
        elif path.name.endswith(".zst"):
            arrow = extra("pyarrow", f"{path}: to read .zst")
            # It tells a file that is cut off from one that ends, and refuses windows of more than 128 MiB.
            with arrow.CompressedInputStream(arrow.PythonFile(stream, mode="r"), "zstd") as found:
                yield cast(BinaryIO, io.BufferedReader(found, 1 << 18))
        else:
            yield stream
