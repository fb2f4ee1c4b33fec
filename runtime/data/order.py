"""The order in which samples of a text are drawn. Sample i is a pure function of (seed, i): no state, nothing stored.

An epoch visits each window of the text once, in an order of its own. In a run whose phases have sequences of several
lengths the text lies in pieces as long as the longest of them. The pieces of an epoch are permuted, and each phase has
as many of them as it trains on, one after the other; the windows of its pieces are permuted among themselves. So each
token of the pieces is in one window of an epoch, whichever phase draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.contract import EXTRA_TOKENS
from runtime.data.permutation import Numbers, permuted, permuted_all, unpermuted

PADDING = -(1 << 31)  # behind the last token of a sample of rows: no token, and below every ~id


def windows_in(tokens: int, sequence: int, longest: int | None = None) -> int:
    """How many windows of `sequence` tokens a text of so many tokens has.

    longest: the longest sequence of a run with phases, whose text lies in pieces of that length.
    """
    piece = longest or sequence
    return max(0, tokens - EXTRA_TOKENS) // piece * (piece // sequence)


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

    def windows_of(self, indices: Numbers) -> Numbers:
        """The windows of several samples, as `window` says them."""
        epochs, places = np.divmod(indices, self.windows)
        for epoch in np.unique(epochs).tolist():
            at = epochs == epoch
            places[at] = self._windows(places[at], epoch)
        return places

    def _windows(self, places: Numbers, epoch: int) -> Numbers:
        """The windows at these places of an epoch."""
        if not self.piece:
            return permuted_all(places, self.windows, self.seed, epoch)
        low, high = self._span(epoch)
        inside = (low <= places) & (places < high)
        if low < high:
            places[inside] = low + permuted_all(places[inside] - low, high - low, self.seed, -1 - epoch)
        pieces, parts = np.divmod(places, self._parts)
        return permuted_all(pieces, self._pieces, self.seed, epoch) * self._parts + parts

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
        return self.has_pieces_of(other) and self.end == other.first

    def has_pieces_of(self, other: Order) -> bool:
        """Whether another order draws the same pieces, in the same order."""
        return self.piece == other.piece > 0 and self.seed == other.seed and self._pieces == other._pieces

    @property
    def whole(self) -> Order:
        """The order of a phase that has the whole run."""
        return replace(self, first=0, end=None)

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


def put_by_cost(samples: Numbers, seen: Numbers, order: Sequence[int]) -> Numbers:
    """The samples of a step, put so that those of one micro-batch of all data ranks cost attention about the same.

    `seen`: what each sample costs. `order`: at each position of the schedule, the rank of its micro-batch among all,
    the cheapest being 0. Every second micro-batch has its samples in falling order, so that no data rank has the
    dearest of each.
    """
    ranked = samples[np.argsort(seen, kind="stable")].reshape(len(order), -1)
    ranked[1::2] = ranked[1::2, ::-1].copy()
    return ranked[list(order)].reshape(-1)
