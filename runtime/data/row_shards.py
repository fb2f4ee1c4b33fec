"""Rows of tokens with what the loss is on: a shard in Megatron's format, and `<prefix>.loss` with a byte a token.

A byte is 1 where the loss is on the token, else 0. In memory a token without loss is ~id, which is below 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from runtime.data.files import DataError
from runtime.data.shards import Reader, Tokens, Writer

UNALIGNED = (
    "the prompt alone, after which the model writes, has other tokens than in front of the completion; the loss begins "
    "with the completion's first token"
)
UNSTARTED = (
    "the row does not begin with the token that the tokenizer puts in front of texts; if the model was trained with "
    "it, the chat template has to write {{ bos_token }} first"
)


@dataclass(frozen=True)
class Notices:
    """How many rows, conversations or prompts, have tokens that a reader may not expect. Part of meta.json.

    `unaligned`: the prompt alone has other tokens than in front of its completion. `unstarted`: the row does not begin
    with the tokens that the tokenizer puts in front of texts.
    """

    unaligned: int = 0
    unstarted: int = 0

    def __add__(self, other: Notices) -> Notices:
        return Notices(self.unaligned + other.unaligned, self.unstarted + other.unstarted)

    @classmethod
    def of(cls, meta: Mapping[str, int]) -> Notices:
        """Return the notices in what meta.json says of rows."""
        return cls(meta.get("unaligned", 0), meta.get("unstarted", 0))

    def notes(self) -> list[str]:
        """Return a sentence for each kind of which there are rows."""
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
        return [f"in {count:,} {'row' if count == 1 else 'rows'} {what}" for count, what in kinds if count]


class RowWriter:
    """Writes a shard of rows, as a context manager. The files must not exist; all are synced at the end."""

    def __init__(self, prefix: Path, vocab: int) -> None:
        self._writer = Writer(prefix, vocab)
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
    """A memory-mapped shard of rows. Raises DataError, naming the file, unless its files agree."""

    def __init__(self, prefix: Path) -> None:
        self.reader = Reader(prefix)
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

    def row(self, index: int, most: int | None = None) -> Tokens:
        """The tokens of a row, or the first `most` of them; ~id where the loss is not on one."""
        first, last = (int(self.reader.starts[i]) for i in (index, index + 1))
        return self._tokens(first, last if most is None else min(last, first + most))

    def chunks(self, num_tokens: int = 1 << 22) -> Iterator[Tokens]:
        """All tokens, in pieces of at most `num_tokens`."""
        for first in range(0, self.reader.num_tokens, num_tokens):
            yield self._tokens(first, min(first + num_tokens, self.reader.num_tokens))

    def first_targets(self, num_tokens: int = 1 << 22) -> npt.NDArray[np.int64]:
        """Place in each row of its first token that is a target: the loss is on it, and another is before it. A row
        without one has its size there."""
        starts, sizes = self.reader.starts, self.sizes
        found, begin = sizes.copy(), 0
        while begin < self.num_rows:
            end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + num_tokens, "right")) - 1)
            places = np.flatnonzero(self._loss[starts[begin] : starts[end]]) + starts[begin]
            following = np.searchsorted(places, starts[begin:end] + 1)
            target = np.append(places, starts[-1])[following] - starts[begin:end]
            found[begin:end] = np.minimum(sizes[begin:end], target)
            begin = end
        return found

    def _tokens(self, first: int, last: int) -> Tokens:
        ids = self.reader.tokens(first, last)
        return np.where(self._loss[first:last] != 0, ids, ~ids)


def _loss_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".loss")
