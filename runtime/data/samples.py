"""Samples of a prepared corpus. Sample i is a pure function of (seed, i): no rank count, no state, nothing stored.

The documents of a split, one after the other, are cut into windows `sequence` apart; a sample is a window and the first
`extra` tokens of the next, its targets. Of conversations each row is a sample, or several rows that are packed. Every
epoch of training visits each window, row or pack once, in an order of its own.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from runtime.contract import Chat
from runtime.data.errors import DataError
from runtime.data.packing import Packs, packed
from runtime.data.row_shards import RowReader
from runtime.data.shards import Reader

SPLITS = ("train", "validation")
Fate = Literal["sample", "cut", "dropped", "without_loss"]  # of a row
PADDING = -1  # ~0: read as token 0, and nobody's target
_ROUNDS = 6  # four make a Feistel network over a good round function indistinguishable from chance (Luby and Rackoff)


class Samples:
    """The samples of one split of a prepared folder. Training is permuted anew each epoch, validation is in order.

    Raises DataError when the split is shorter than one sample.
    """

    def __init__(self, folder: Path, split: str, sequence: int, extra: int = 2, *, seed: int) -> None:
        assert split in SPLITS and sequence > 0 and extra >= 0
        self.split, self.sequence, self.extra, self.seed = split, sequence, extra, seed
        self.reader = Reader(folder / split)
        self.num_windows = max(0, self.reader.num_tokens - extra) // sequence
        if self.num_windows == 0:
            raise DataError(
                f"{self.reader.data_path}: {self.reader.num_tokens} {split} tokens, fewer than one sample of "
                f"{sequence + extra}; shorten the sequence or give more text"
            )

    def window(self, index: int) -> int:
        """Which window sample `index` is: 0 ≤ window < num_windows."""
        return _window(index, self.num_windows, self.split, self.seed)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """[sequence + extra] token ids of sample `index`."""
        first = self.window(index) * self.sequence
        return self.reader.tokens(first, first + self.sequence + self.extra)

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """[sequence + extra]: where in the sample the document of each of its tokens begins, 0 if that is before it."""
        first = self.window(index) * self.sequence
        tokens = np.arange(first, first + self.sequence + self.extra)
        documents = np.searchsorted(self.reader.starts, tokens, "right") - 1
        return np.maximum(self.reader.starts[documents] - first, 0)


class Survey:
    """The rows of one split of conversations, and what becomes of each under a sequence: it is a sample, or in one with
    others if they are packed, or of either its end is cut, or it is left out because it is too long under `drop`, or
    because it has no target.
    """

    def __init__(
        self, folder: Path, split: str, sequence: int, long: Literal["cut", "drop"], *, pack: bool = False
    ) -> None:
        assert split in SPLITS and sequence > 0
        self.split, self.sequence = split, sequence
        self.reader = RowReader(folder / split)
        self.is_long = self.reader.sizes > sequence
        self.is_dropped = self.is_long & (long == "drop")
        self.has_target = self.reader.first_targets() < np.minimum(self.reader.sizes, sequence)
        self.rows = np.flatnonzero(~self.is_dropped & self.has_target)  # that are trained on
        sizes = np.minimum(self.reader.sizes[self.rows], sequence)
        self.packs: Packs | None = packed(self.rows, sizes, sequence) if pack else None
        num_samples = len(self.rows) if self.packs is None else len(self.packs)
        self.facts = {
            "rows": self.reader.num_rows,
            "samples": num_samples,
            "padding": num_samples * sequence - int(sizes.sum()),
            "cut": int(self.is_long[self.rows].sum()),
            "dropped": int(self.is_dropped.sum()),
            "without_loss": int((~self.is_dropped & ~self.has_target).sum()),
        }

    def fate(self, row: int) -> Fate:
        """What becomes of a row."""
        if self.is_dropped[row]:
            return "dropped"
        if not self.has_target[row]:
            return "without_loss"
        return "cut" if self.is_long[row] else "sample"

    def notes(self) -> list[str]:
        """What becomes of rows that are not trained on as they are; a sentence for each."""
        kinds = (
            ("cut", f"longer than {self.sequence:,} tokens, and cut there"),
            ("dropped", f"longer than {self.sequence:,} tokens, and left out"),
            ("without_loss", f"without a token in the first {self.sequence:,} that the loss is on, and left out"),
        )
        of = f"of {self.facts['rows']:,} {self.split} rows"
        found = [f"{self.facts[name]:,} {of} are {what}" for name, what in kinds if self.facts[name]]
        if self.packs:
            samples, padding = self.facts["samples"], self.facts["padding"]
            share = f"{padding / (samples * self.sequence):.1%} of their tokens are padding"
            found.append(f"{len(self.rows):,} {self.split} rows are packed into {samples:,} sequences; {share}")
        return found


class RowSamples:
    """The samples of one split of conversations: a row is a sample, padded to `sequence + extra` tokens; or those rows
    are that `pack` puts together.

    A token without loss is ~id; padding is -1. A row has at most `sequence` tokens: the rest of a longer one is cut, or
    under `drop` the row is left out. Rows without a target are left out, too. Raises DataError when none is left.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        sequence: int,
        extra: int = 2,
        *,
        seed: int,
        long: Literal["cut", "drop"],
        pack: bool = False,
    ) -> None:
        assert extra >= 0
        self.split, self.sequence, self.extra, self.seed = split, sequence, extra, seed
        self.survey = Survey(folder, split, sequence, long, pack=pack)
        self.num_windows = self.survey.facts["samples"]
        if self.num_windows == 0:
            reasons = "".join(f"; {note}" for note in self.survey.notes())
            raise DataError(f"{folder / split}: no row is left to be a sample{reasons}")

    def window(self, index: int) -> int:
        """Which row that is trained on, or which pack, sample `index` is: 0 ≤ window < num_windows."""
        return _window(index, self.num_windows, self.split, self.seed)

    def rows(self, window: int) -> npt.NDArray[np.int64]:
        """The rows that are in a window, by their numbers."""
        packs = self.survey.packs
        return self.survey.rows[window : window + 1] if packs is None else packs.rows(window)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """[sequence + extra] token ids of sample `index`."""
        found = np.full(self.sequence + self.extra, PADDING)
        ids = np.concatenate([self.survey.reader.row(int(row), self.sequence) for row in self.rows(self.window(index))])
        found[: len(ids)] = ids
        return found

    def starts(self, index: int) -> npt.NDArray[np.int64]:
        """[sequence + extra]: where in the sample the row of each of its tokens begins. Padding is as a row."""
        rows = self.rows(self.window(index))
        sizes = np.minimum(self.survey.reader.sizes[rows], self.sequence)
        ends = np.cumsum(sizes)
        sizes = np.append(sizes, self.sequence + self.extra - ends[-1])
        return np.repeat(np.insert(ends, 0, 0), sizes)


def samples_of(
    folder: Path, split: str, sequence: int, extra: int, *, seed: int, chat: Chat | None
) -> Samples | RowSamples:
    """The samples of one split of a prepared folder: windows of text, or rows of conversations."""
    if chat is None:
        return Samples(folder, split, sequence, extra, seed=seed)
    return RowSamples(folder, split, sequence, extra, seed=seed, long=chat.long, pack=chat.pack)


def _window(index: int, num: int, split: str, seed: int) -> int:
    assert index >= 0, "samples count from 0"
    epoch, place = divmod(index, num)
    return place if split == "validation" else permuted(place, num, seed, epoch)


def permuted(place: int, num: int, seed: int, epoch: int) -> int:
    """Where `place` goes under the permutation of range(num) that (seed, epoch) names.

    A Feistel network permutes the least 4^k ≥ num; walking its cycle until below num gives a permutation of range(num)
    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002), in 4 steps or fewer on average.
    """
    assert 0 <= place < num
    key, half = _network(num, seed, epoch)
    place = _feistel(place, half, key)
    while place >= num:
        place = _feistel(place, half, key)
    return place


def unpermuted(window: int, num: int, seed: int, epoch: int) -> int:
    """The place that `permuted` sends to `window`."""
    assert 0 <= window < num
    key, half = _network(num, seed, epoch)
    window = _feistel_back(window, half, key)
    while window >= num:
        window = _feistel_back(window, half, key)
    return window


def _network(num: int, seed: int, epoch: int) -> tuple[bytes, int]:
    """Key and half of the bits of the network that permutes range(num)."""
    key = hashlib.blake2b(f"{seed}\0{epoch}".encode(), digest_size=32).digest()
    return key, max(1, ((num - 1).bit_length() + 1) // 2)


def _feistel(value: int, half: int, key: bytes) -> int:
    """One permutation of [0, 4^half)."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_round(number, right, key) & mask)
    return left << half | right


def _feistel_back(value: int, half: int, key: bytes) -> int:
    """The inverse of `_feistel`."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in reversed(range(_ROUNDS)):
        left, right = right ^ (_round(number, left, key) & mask), left
    return left << half | right


def _round(number: int, half: int, key: bytes) -> int:
    block = hashlib.blake2b(struct.pack("<BQ", number, half), key=key, digest_size=8).digest()
    return int.from_bytes(block, "little")
