"""The documents of one file, by its suffix: text, lines of JSON, or a column of a table.

A document has at most 64 MiB. Compressed lines are read in pieces, and tables in a process with limits
(runtime/data/tables.py), so a small file that expands without end causes an error instead of filling memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, cast

from runtime.data.files import DataError, import_extra, open_regular

TEXT_SUFFIXES = (".txt", ".md", ".py")
LINE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES, *TABLE_SUFFIXES)
MAX_DOCUMENT_BYTES = 64 << 20
COLUMN = "text"
BATCH_BYTES = 1 << 20
BOM = codecs.BOM_UTF8  # may precede a UTF-8 text, but is not part of it
_SURROGATE = re.compile("[\ud800-\udfff]")
_WIDE_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # those of UTF-32 begin or end with them


@dataclass(frozen=True, slots=True, order=True)
class SourceFile:
    """A file of the corpus. `name` is relative to the source's folder, with `/`. `column`: the key or table column with
    the text of a row. `mask`: a byte for each document, 0 if filters leave it out; None if all are read."""

    name: str
    path: Path
    column: str = COLUMN
    mask: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def is_one_document(self) -> bool:
        return suffix_of(self.path) in TEXT_SUFFIXES


def suffix_of(path: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Return the suffix of a file name among `suffixes`, or ""."""
    return next((suffix for suffix in suffixes if path.name.endswith(suffix) and path.name != suffix), "")


def documents(file: SourceFile) -> Iterator[str]:
    """Yield the non-empty documents of one file. Raises DataError with file and line, or row, for an invalid one."""
    suffix = suffix_of(file.path)
    if suffix in LINE_SUFFIXES:
        texts = _texts_of_lines(file.path, file.column)
    elif suffix in TABLE_SUFFIXES:
        from runtime.data.tables import texts_of_table

        texts = texts_of_table(file.path, file.column, MAX_DOCUMENT_BYTES)
    else:
        texts = iter((read_text(file.path),))
    nonempty = (text for text in texts if text)
    return nonempty if file.mask is None else compress(nonempty, file.mask)


Document = tuple[SourceFile, str]
Batch = Sequence[Document]


def batches(files: Iterable[SourceFile], read: Callable[[SourceFile], Iterable[str]]) -> Iterator[list[Document]]:
    """Yield batches of documents or rows, about BATCH_BYTES each: enough to keep all cores busy. `read`: reads a
    file."""
    batch: list[Document] = []
    size = 0
    for file in files:
        for text in read(file):
            batch.append((file, text))
            size += len(text)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def read_text(path: Path) -> str:
    """Read a file that is one document. DataError if it is too long, UnicodeDecodeError if it is not UTF-8."""
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
        if not text.isascii() and _SURROGATE.search(text):
            raise DataError(f'{place}: "{column}" holds half of a surrogate pair, which no UTF-8 text has')
        yield text


def json_lines(path: Path) -> Iterator[tuple[str, bytes, Any]]:
    """Yield (file:line, bytes, value) of every non-blank line. Raises DataError for a line that is not JSON."""
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
    """Open a file for reading, decompressed on the fly."""
    with open_regular(path) as stream:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=stream) as decompressed:
                yield cast(BinaryIO, decompressed)
        elif path.name.endswith(".zst"):
            arrow = import_extra("pyarrow", f"{path}: to read .zst")
            # It detects truncated files, and refuses windows of more than 128 MiB.
            with arrow.CompressedInputStream(arrow.PythonFile(stream, mode="r"), "zstd") as decompressed:
                yield cast(BinaryIO, io.BufferedReader(decompressed, 1 << 18))
        else:
            yield stream
