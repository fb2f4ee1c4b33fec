"""The order in which samples of a text are drawn. Sample i is a pure function of (seed, i): no state, nothing stored.

An epoch visits each window of the text once, in an order of its own. In a run whose phases have sequences of several
lengths the text lies in pieces as long as the longest of them. The pieces of an epoch are permuted, and each phase has
as many of them as it trains on, one after the other; the windows of its pieces are permuted among themselves. So each
token of the pieces is in one window of an epoch, whichever phase draws it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

_ROUNDS = 6  # four make a Feistel network over a good round function indistinguishable from chance (Luby and Rackoff)


@dataclass(frozen=True)
class Order:
    """The order of training samples: an epoch has `windows` windows of `sequence` tokens, permuted by `seed`.

    Of a phase, `piece` is the longest sequence of the run. The phase draws the tokens from `first` on, counted over all
    epochs of the run, up to `end`; None: to the end of the run. Sample i begins at token i · sequence of that count.
    """

    sequence: int
    windows: int
    seed: int
    piece: int = 0  # 0: windows are permuted by themselves
    first: int = 0
    end: int | None = None

    def window(self, index: int) -> int:
        """The window of the text that a sample is: 0 ≤ window < windows."""
        epoch, place = divmod(index, self.windows)
        if not self.piece:
            return permuted(place, self.windows, self.seed, epoch)
        low, high = self._span(epoch)
        if low <= place < high:
            place = low + permuted(place - low, high - low, self.seed, -1 - epoch)
        piece, part = divmod(place, self._parts)
        return permuted(piece, self._pieces, self.seed, epoch) * self._parts + part

    def index(self, window: int, epoch: int) -> int:
        """The sample of an epoch that is this window: what `window` sends to it."""
        if not self.piece:
            return epoch * self.windows + unpermuted(window, self.windows, self.seed, epoch)
        piece, part = divmod(window, self._parts)
        place = unpermuted(piece, self._pieces, self.seed, epoch) * self._parts + part
        low, high = self._span(epoch)
        if low <= place < high:
            place = low + unpermuted(place - low, high - low, self.seed, -1 - epoch)
        return epoch * self.windows + place

    def tokens_of(self, index: int) -> tuple[int, int]:
        """[first, end) of the tokens of a sample in the text, its targets beyond the window left out."""
        first = self.window(index) * self.sequence
        return first, first + self.sequence

    def goes_on_in(self, other: Order) -> bool:
        """Whether another order draws, of the same pieces, what follows the end of this one."""
        same = self.piece == other.piece > 0 and self.seed == other.seed and self._pieces == other._pieces
        return same and self.end == other.first

    @property
    def _parts(self) -> int:
        """Windows of a piece."""
        return self.piece // self.sequence

    @property
    def _pieces(self) -> int:
        """Pieces of an epoch."""
        return self.windows // self._parts

    def _span(self, epoch: int) -> tuple[int, int]:
        """The places [low, high) of an epoch that are this phase's."""
        begin = epoch * self.windows
        low = self.first // self.sequence - begin
        high = self.windows if self.end is None else self.end // self.sequence - begin
        return max(0, min(low, self.windows)), max(0, min(high, self.windows))

    def to_json(self) -> dict[str, Any]:
        """The fields; of a run without phases, those that it has."""
        plain = {"sequence": self.sequence, "windows": self.windows, "seed": self.seed}
        return plain | ({"piece": self.piece, "first": self.first, "end": self.end} if self.piece else {})


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
