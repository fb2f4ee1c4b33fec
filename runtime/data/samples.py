"""Samples of a prepared corpus. Sample i is a pure function of (seed, i): no rank count, no state, nothing stored.

The documents of a split, one after the other, are cut into windows `sequence` apart; a sample is a window and the first
`extra` tokens of the next, its targets. Every epoch of training visits each window once, in an order of its own.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.data.errors import DataError
from runtime.data.shards import Reader

SPLITS = ("train", "validation")
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
        assert index >= 0, "samples count from 0"
        epoch, place = divmod(index, self.num_windows)
        return place if self.split == "validation" else permuted(place, self.num_windows, self.seed, epoch)

    def tokens(self, index: int) -> npt.NDArray[np.int64]:
        """[sequence + extra] token ids of sample `index`."""
        first = self.window(index) * self.sequence
        return self.reader.tokens(first, first + self.sequence + self.extra)


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
