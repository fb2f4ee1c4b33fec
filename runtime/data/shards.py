r"""Token shards in Megatron's format: `<prefix>.bin` has the token ids, `<prefix>.idx` the starts of documents.

The index, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py): `MMIDIDX\0\0`, version u64 = 1,
dtype code u8, number of sequences u64, number of document indices u64; then sizes i32 (tokens of each sequence),
pointers i64 (first byte of each sequence in .bin) and document indices i64 (first sequence of each document, and the
end). Files written here have one sequence per document; Megatron's may have several.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from runtime.data.files import DataError, open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
UINT16_VOCAB = 65500  # Megatron's own bound
# Code → dtype. Codes 6 and 7 are floats, which cannot be tokens.
DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
Tokens = npt.NDArray[np.int64]


def dtype_code(vocab: int) -> int:
    """Return the code of uint16 if every id fits, else of int32."""
    return 8 if vocab < UINT16_VOCAB else 4


class ShardWriter:
    """Writes a shard, document by document, as a context manager. The files must not exist; both are synced at the end.

    Without a clean end there is no index, so a torn shard is never read.
    """

    def __init__(self, prefix: Path, vocab: int) -> None:
        self.vocab = vocab
        self.code = dtype_code(vocab)
        self.sizes: list[int] = []
        self._index = prefix.with_name(prefix.name + ".idx")
        self._data: BinaryIO = prefix.with_name(prefix.name + ".bin").open("xb")

    def __enter__(self) -> ShardWriter:
        return self

    def add(self, ids: Sequence[int] | Tokens) -> npt.NDArray[Any]:
        """Append one document, including its end token. Return it as written."""
        tokens = np.asarray(ids, dtype=np.int64)
        assert tokens.ndim == 1 and 0 < tokens.size < 2**31, "a document is a non-empty list of fewer than 2³¹ ids"
        assert tokens.min() >= 0 and tokens.max() < self.vocab, f"an id is outside the vocabulary of {self.vocab}"
        written = tokens.astype(np.dtype(DTYPES[self.code]).newbyteorder("<"))
        self._data.write(written.tobytes())
        self.sizes.append(tokens.size)
        return written

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._data as data:
            _sync(data)
        if kind is None:
            with self._index.open("xb") as index:
                index.write(index_bytes(self.sizes, self.code))
                _sync(index)


def index_bytes(sizes: Sequence[int], code: int) -> bytes:
    """Return the `.idx` file of documents with these token counts."""
    counts = np.asarray(sizes, dtype="<i4")
    header = HEADER.pack(MAGIC, VERSION, code, len(sizes), len(sizes) + 1)
    documents = np.arange(len(sizes) + 1, dtype="<i8")
    return header + counts.tobytes() + _pointers(counts, code).tobytes() + documents.tobytes()


def _pointers(sizes: npt.NDArray[Any], code: int) -> npt.NDArray[Any]:
    ends = np.cumsum(sizes, dtype="<i8") * np.dtype(DTYPES[code]).itemsize
    return np.concatenate([np.zeros(min(1, ends.size), dtype="<i8"), ends[:-1]])


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


class Stream(Protocol):
    """Concatenated documents of token ids. `starts`: start of each document, and the end: [documents + 1] int64."""

    data_path: Path  # for messages
    starts: Tokens
    num_tokens: int

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def tokens(self, first: int, last: int) -> Tokens:
        """Return tokens [first, last) of the stream of all documents: [last - first] int64, a copy."""
        ...

    def document(self, index: int) -> Tokens:
        """Return all tokens of one document."""
        return self.tokens(int(self.starts[index]), int(self.starts[index + 1]))

    def chunks(self, num_tokens: int = 1 << 22) -> Iterator[Tokens]:
        """Yield the whole stream, in pieces of at most `num_tokens`."""
        for first in range(0, self.num_tokens, num_tokens):
            yield self.tokens(first, min(first + num_tokens, self.num_tokens))


class ShardReader(Stream):
    """A memory-mapped shard, as one stream of tokens and as documents.

    Raises DataError that names the file unless header, index and length of the data agree in every byte.
    """

    def __init__(self, prefix: Path) -> None:
        self.index_path = prefix.with_name(prefix.name + ".idx")
        self.data_path = prefix.with_name(prefix.name + ".bin")
        code, sizes, first_sequences = _read_index(self.index_path)
        dtype = np.dtype(DTYPES[code]).newbyteorder("<")
        sequences = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        self.starts: Tokens = sequences[first_sequences]  # start of each document in the stream, and the end
        self.num_tokens = int(self.starts[-1])
        expected, num_bytes = self.num_tokens * dtype.itemsize, _size(self.data_path)
        if num_bytes != expected:
            raise DataError(f"{self.data_path}: {num_bytes} bytes, its index says {expected}")
        self._stream: npt.NDArray[Any] = (
            np.memmap(self.data_path, dtype=dtype, mode="r") if self.num_tokens else np.zeros(0, dtype)
        )

    def tokens(self, first: int, last: int) -> Tokens:
        """Return tokens [first, last) of the stream of all documents: [last - first] int64, a copy."""
        assert 0 <= first <= last <= self.num_tokens, f"[{first}, {last}) of {self.num_tokens} tokens"
        return self._stream[first:last].astype(np.int64)


def _read_index(path: Path) -> tuple[int, npt.NDArray[Any], npt.NDArray[Any]]:
    """Return (dtype code, tokens of each sequence, first sequence of each document and the end)."""
    num_bytes = _size(path)
    with open_regular(path) as stream:
        head = stream.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DataError(f"{path}: not a shard index (no MMIDIDX header)")
        _, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if version != VERSION or code not in DTYPES:
            raise DataError(f"{path}: version {version} with dtype code {code}; expected version 1 and integer tokens")
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if num_sequences and num_bytes == expected + num_sequences:
            raise DataError(f"{path}: an index with modes, as of images: only text is read")
        if num_bytes != expected:
            raise DataError(f"{path}: {num_bytes} bytes, its header says {expected}")
        sizes = np.frombuffer(stream.read(4 * num_sequences), "<i4")
        pointers = np.frombuffer(stream.read(8 * num_sequences), "<i8")
        documents = np.frombuffer(stream.read(8 * num_indices), "<i8")
    is_whole = (
        documents.size > 0 and documents[0] == 0 and documents[-1] == sizes.size and (np.diff(documents) >= 0).all()
    )
    if (sizes < 0).any() or not np.array_equal(pointers, _pointers(sizes, code)) or not is_whole:
        raise DataError(f"{path}: sizes, pointers and documents of the index disagree")
    return code, sizes, documents


def _size(path: Path) -> int:
    if path.is_symlink() or not path.is_file():
        raise DataError(f"{path}: no such file of a shard")
    return path.stat().st_size


# --- Rows of tokens with a loss mask: a shard in Megatron's format, and `<prefix>.loss` with a byte per token
#
# A byte is 1 if the loss is on the token, else 0. In memory a token without loss is ~id, which is below 0.

UNALIGNED = (
    "the prompt's tokens change when the completion is appended, so training and generation differ there; the loss "
    "begins with the completion's first token"
)
UNSTARTED = (
    "the row does not begin with the token that the tokenizer puts before a text (BOS); if the model was trained with "
    "it, the chat template must write {{ bos_token }} first"
)


@dataclass(frozen=True)
class Notices:
    """The numbers of rows (conversations or prompts) with unexpected tokens. Part of meta.json.

    `unaligned`: the prompt alone has other tokens than before its completion. `unstarted`: the row does not start with
    the tokens that the tokenizer puts before texts.
    """

    unaligned: int = 0
    unstarted: int = 0

    def __add__(self, other: Notices) -> Notices:
        return Notices(self.unaligned + other.unaligned, self.unstarted + other.unstarted)

    @classmethod
    def of(cls, meta: Mapping[str, int]) -> Notices:
        """Return the notices in the entry of meta.json for rows."""
        return cls(meta.get("unaligned", 0), meta.get("unstarted", 0))

    def notes(self) -> list[str]:
        """Return a sentence for each kind of unexpected tokens."""
        kinds = (
            (
                self.unaligned,
                UNALIGNED,
            ),
            (
                self.unstarted,
                UNSTARTED,
            ),
        )
        return [f"in {count:,} {'row' if count == 1 else 'rows'} {problem}" for count, problem in kinds if count]


class RowWriter:
    """Writes a shard of rows, as a context manager. The files must not exist; all are synced at the end."""

    def __init__(self, prefix: Path, vocab: int) -> None:
        self._writer = ShardWriter(prefix, vocab)
        self._loss = _loss_path(prefix).open("xb")

    @property
    def sizes(self) -> list[int]:
        """Tokens of each row."""
        return self._writer.sizes

    def __enter__(self) -> RowWriter:
        self._writer.__enter__()
        return self

    def add(self, ids: Tokens) -> None:
        """Append one row."""
        loss = ids >= 0
        self._writer.add(np.where(loss, ids, ~ids))
        self._loss.write(loss.astype(np.uint8).tobytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._loss as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._writer.__exit__(kind, error, trace)


class RowReader:
    """A memory-mapped shard of rows. Raises DataError that names the file unless its files agree."""

    def __init__(self, prefix: Path) -> None:
        self.reader = ShardReader(prefix)
        path, size = _loss_path(prefix), self.reader.num_tokens
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            raise DataError(f"{path}: not a file of {size} bytes, one for each token")
        self._loss: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)

    @property
    def num_rows(self) -> int:
        return self.reader.num_documents

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.reader.starts)

    def row(self, index: int, limit: int | None = None) -> Tokens:
        """Return the tokens of a row, or the first `limit` of them; ~id for tokens without loss."""
        first, last = (int(self.reader.starts[i]) for i in (index, index + 1))
        return self._tokens(first, last if limit is None else min(last, first + limit))

    def chunks(self, num_tokens: int = 1 << 22) -> Iterator[Tokens]:
        """Yield all tokens, in pieces of at most `num_tokens`."""
        for first in range(0, self.reader.num_tokens, num_tokens):
            yield self._tokens(first, min(first + num_tokens, self.reader.num_tokens))

    def first_targets(self, num_tokens: int = 1 << 22) -> npt.NDArray[np.int64]:
        """Return the index in each row of its first target: a token with loss that is not the first of the row. The
        size of the row if there is none."""
        starts, sizes = self.reader.starts, self.sizes
        targets, begin = sizes.copy(), 0
        while begin < self.num_rows:
            end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + num_tokens, "right")) - 1)
            places = np.flatnonzero(self._loss[starts[begin] : starts[end]]) + starts[begin]
            following = np.searchsorted(places, starts[begin:end] + 1)
            target = np.append(places, starts[-1])[following] - starts[begin:end]
            targets[begin:end] = np.minimum(sizes[begin:end], target)
            begin = end
        return targets

    def _tokens(self, first: int, last: int) -> Tokens:
        ids = self.reader.tokens(first, last)
        return np.where(self._loss[first:last] != 0, ids, ~ids)


def _loss_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".loss")
