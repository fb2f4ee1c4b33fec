"""The order in which samples of a text are drawn. Sample i is a pure function of (seed, i): there is no state.

An epoch visits each window of the text once, in its own order. If the phases of a run have different sequence lengths,
the text is divided into pieces as long as the longest sequence. The pieces of an epoch are permuted, and each phase
takes the next pieces that it needs; the windows of its pieces are permuted among themselves. So each token of the
pieces is in one window of an epoch, in any phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.contract import EXTRA_TOKENS
from runtime.data.permutation import Numbers, permute, permute_all, unpermute

PADDING = -(1 << 31)  # fills a sample of rows after its last token: no token, and below every ~id


def windows_in(tokens: int, sequence: int, longest: int | None = None) -> int:
    """Return the number of windows of `sequence` tokens in a text of `tokens` tokens.

    longest: in a run with phases, the longest sequence, which is the length of pieces.
    """
    piece = longest or sequence
    return max(0, tokens - EXTRA_TOKENS) // piece * (piece // sequence)


@dataclass(frozen=True)
class Order:
    """The order of training samples: an epoch has `windows` windows of `sequence` tokens, permuted by `seed`.

    In a phase, `piece` is the longest sequence of the run. The phase draws tokens [first, end), counted over all epochs
    of the run; `end` is None for the last phase. Sample i begins at token i · sequence of that count.
    """

    sequence: int
    windows: int
    seed: int
    piece: int = 0  # 0: no pieces, windows are permuted
    first: int = 0
    end: int | None = None

    def window(self, index: int) -> int:
        """Return the window of a sample: 0 ≤ window < windows."""
        epoch, place = divmod(index, self.windows)
        if not self.piece:
            return permute(place, self.windows, self.seed, epoch)
        low, high = self._span(epoch)
        if low <= place < high:
            place = low + permute(place - low, high - low, self.seed, -1 - epoch)
        piece, part = divmod(place, self._parts)
        return permute(piece, self._pieces, self.seed, epoch) * self._parts + part

    def windows_of(self, indices: Numbers) -> Numbers:
        """Return the windows of several samples, as `window` does."""
        epochs, places = np.divmod(indices, self.windows)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            places[in_epoch] = self._windows(places[in_epoch], epoch)
        return places

    def _windows(self, places: Numbers, epoch: int) -> Numbers:
        """Return the windows at these places of an epoch."""
        if not self.piece:
            return permute_all(places, self.windows, self.seed, epoch)
        low, high = self._span(epoch)
        inside = (low <= places) & (places < high)
        if low < high:
            places[inside] = low + permute_all(places[inside] - low, high - low, self.seed, -1 - epoch)
        pieces, parts = np.divmod(places, self._parts)
        return permute_all(pieces, self._pieces, self.seed, epoch) * self._parts + parts

    def index(self, window: int, epoch: int) -> int:
        """Return the sample of an epoch that has this window; the inverse of `window`."""
        if not self.piece:
            return epoch * self.windows + unpermute(window, self.windows, self.seed, epoch)
        piece, part = divmod(window, self._parts)
        place = unpermute(piece, self._pieces, self.seed, epoch) * self._parts + part
        low, high = self._span(epoch)
        if low <= place < high:
            place = low + unpermute(place - low, high - low, self.seed, -1 - epoch)
        return epoch * self.windows + place

    def tokens_of(self, index: int) -> tuple[int, int]:
        """Return [first, end) of a sample's tokens in the text, without the targets beyond its window."""
        first = self.window(index) * self.sequence
        return first, first + self.sequence

    def goes_on_in(self, other: Order) -> bool:
        """Whether another order continues at the end of this one, with the same pieces."""
        return self.has_pieces_of(other) and self.end == other.first

    def has_pieces_of(self, other: Order) -> bool:
        """Whether another order draws the same pieces, in the same order."""
        return self.piece == other.piece > 0 and self.seed == other.seed and self._pieces == other._pieces

    @property
    def whole_run(self) -> Order:
        """This order for the whole run, without the bounds of a phase."""
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
        """Return the places [low, high) of an epoch that belong to this phase."""
        begin = epoch * self.windows
        low = self.first // self.sequence - begin
        high = self.windows if self.end is None else self.end // self.sequence - begin
        return max(0, min(low, self.windows)), max(0, min(high, self.windows))

    def to_json(self) -> dict[str, Any]:
        """Return the fields; without phases, those of a plain order."""
        plain = {"sequence": self.sequence, "windows": self.windows, "seed": self.seed}
        return plain | ({"piece": self.piece, "first": self.first, "end": self.end} if self.piece else {})


def put_by_cost(samples: Numbers, costs: Numbers, order: Sequence[int]) -> Numbers:
    """Order the samples of a step so that in each micro-batch all data ranks have about the same cost of attention.

    `costs`: cost of each sample. `order`: for each position of the schedule, the rank of its micro-batch by cost, the
    cheapest being 0. Every second micro-batch has its samples in descending order, so that no data rank always has the
    most expensive ones.
    """
    ranked = samples[np.argsort(costs, kind="stable")].reshape(len(order), -1)
    ranked[1::2] = ranked[1::2, ::-1].copy()
    return ranked[list(order)].reshape(-1)
