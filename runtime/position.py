"""Where a run is in its data: what it has trained on, and which samples come next.

The position is part of a checkpoint. It is carried from step to step and never computed from the number of the step,
so a run that goes on with another batch, sequence or seed neither skips samples nor trains on them a second time.

From one phase of a run to the next the samples go on without a seam (runtime/data/order.py).

Where windows are cut anew (another sequence) or are put in another order (another seed), the rest of the current epoch
is what was not seen in it yet: a window of which more than half was seen is left out. Where new windows divide old
ones nothing is skipped and nothing is repeated; otherwise no choice of whole windows skips and repeats fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.data.order import Order

MAX_CUTS = 8  # in one epoch; each is looked at for every window that is drawn after it
MAX_RANGES = 10_000
_MAX = 1 << 62
_MAX_COUNTED = 1 << 13  # windows of an epoch that are few enough to count what is skipped and repeated

Ranges = tuple[tuple[int, int], ...]  # [first, end) of indices of samples, ascending


@dataclass(frozen=True)
class Cut:
    """What was drawn of an epoch under an earlier order: the samples before `next`, and those in `skip`."""

    order: Order
    epoch: int
    next: int
    skip: Ranges

    def seen(self, first: int, end: int, earlier: Sequence[Cut]) -> Iterator[tuple[int, int]]:
        """The parts of the tokens [first, end) that were drawn under this order. `earlier`: cuts before this one."""
        size, windows = self.order.sequence, self.order.windows
        for window in range(first // size, min(windows, -(-end // size))):
            index = self.order.index(window, self.epoch)
            drawn = index < self.next or any(a <= index < b for a, b in self.skip)
            if drawn and not _left_out(self.order, index, earlier):
                yield max(first, window * size), min(end, (window + 1) * size)


def _left_out(order: Order, index: int, cuts: Sequence[Cut]) -> bool:
    """Whether more than half of the sample's window was seen in this epoch under earlier orders."""
    if not cuts or index // order.windows != cuts[0].epoch:
        return False
    return 2 * _num_seen(order, index, cuts) > order.sequence


def _num_seen(order: Order, index: int, cuts: Sequence[Cut]) -> int:
    first, end = order.tokens_of(index)
    parts = sorted(part for k, cut in enumerate(cuts) for part in cut.seen(first, end, cuts[:k]))
    seen, at = 0, first
    for begin, until in parts:
        seen += max(0, until - max(begin, at))
        at = max(at, until)
    return seen


@dataclass(frozen=True)
class Position:
    """`samples` and `tokens` trained on, and the index of the `next` sample. `skip`: samples still to be left out.

    `order`: that of `next`; None where samples are counted only (a run that begins, and tests).
    """

    samples: int = 0
    tokens: int = 0
    next: int = 0
    skip: Ranges = ()
    order: Order | None = None
    cuts: tuple[Cut, ...] = ()

    def draw(self, size: int) -> npt.NDArray[np.int64]:
        """Indices of the next `size` samples."""
        if not self.skip and not self.cuts:
            return np.arange(self.next, self.next + size)
        found: list[int] = []
        index = self.next
        while len(found) < size:
            if inside := [end for first, end in self.skip if first <= index < end]:
                index = max(inside)
                continue
            if self.order is None or not _left_out(self.order, index, self.cuts):
                found.append(index)
            index += 1
        return np.array(found)

    def after(self, drawn: npt.NDArray[np.int64], sequence: int) -> Position:
        """The position when the samples `drawn`, of `sequence` tokens each, have been trained on."""
        following = int(drawn[-1]) + 1
        over = self.order is None or not self.cuts or following // self.order.windows != self.cuts[0].epoch
        return replace(
            self,
            samples=self.samples + len(drawn),
            tokens=self.tokens + len(drawn) * sequence,
            next=following,
            skip=tuple(each for each in self.skip if each[1] > following),
            cuts=() if over else self.cuts,
        )

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> Position:
        """The position with these samples left out, too."""
        return replace(self, skip=_merged([*self.skip, *(each for each in ranges if each[1] > self.next)]))

    def under(self, order: Order, *, same_text: bool) -> Position:
        """Return this position expressed in another order of the samples."""
        was = self.order or order
        if was == order:
            return replace(self, order=order)
        if was.goes_on_in(order) and self.next * was.sequence == order.first and not self.cuts:
            return replace(self, order=order, skip=(), next=order.first // order.sequence)
        if not same_text:  # what was seen of another text says nothing about this one
            return replace(self, order=order, cuts=(), skip=(), next=self.next * was.sequence // order.sequence)
        epoch, place = divmod(self.next, was.windows)
        cut = Cut(was, epoch, self.next, tuple(each for each in self.skip if each[0] < (epoch + 1) * was.windows))
        cuts = (*self.cuts, cut) if place or cut.skip else ()
        return replace(self, order=order, skip=(), next=epoch * order.windows, cuts=cuts[-MAX_CUTS:])

    def at_same_share(self, order: Order) -> Position:
        """Return this position in another order of other windows: where the same share of the epoch was drawn."""
        windows = self.order.windows if self.order else order.windows
        epoch, place = divmod(self.next, windows)
        following = epoch * order.windows + place * order.windows // windows
        return replace(self, order=order, cuts=(), skip=(), next=following)

    def unavoidable(self) -> tuple[int, int] | None:
        """(tokens skipped, tokens repeated) of this epoch because windows were cut anew; None if costly to count."""
        if self.order is None or not self.cuts:
            return 0, 0
        if max(self.order.windows, *(cut.order.windows for cut in self.cuts)) > _MAX_COUNTED:
            return None
        skipped = repeated = 0
        for index in range(self.next, (self.next // self.order.windows + 1) * self.order.windows):
            seen = _num_seen(self.order, index, self.cuts)
            if 2 * seen > self.order.sequence:
                skipped += self.order.sequence - seen
            else:
                repeated += seen
        return skipped, repeated

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "next": self.next,
            "skip": [list(each) for each in self.skip],
            "order": self.order.to_json() if self.order else None,
            "cuts": [
                vars(c) | {"order": c.order.to_json(), "skip": [list(each) for each in c.skip]} for c in self.cuts
            ],
        }

    @staticmethod
    def from_json(value: Any) -> Position:
        """The inverse of `to_json`. ValueError for anything else."""
        _demand(isinstance(value, dict) and value.keys() == vars(Position()).keys())
        samples, tokens, following = (_count(value[name]) for name in ("samples", "tokens", "next"))
        order = None if value["order"] is None else _order(value["order"])
        _demand(isinstance(value["cuts"], list) and len(value["cuts"]) <= MAX_CUTS)
        cuts = tuple(map(_cut, value["cuts"]))
        _demand(not cuts or order is not None)
        _demand(all(cut.epoch == cuts[0].epoch for cut in cuts))
        return Position(samples, tokens, following, ranges(value["skip"]), order, cuts)


def ranges(value: Any) -> Ranges:
    """Ranges of samples from JSON, ascending and apart. ValueError for anything else."""
    _demand(isinstance(value, list) and len(value) <= MAX_RANGES)
    _demand(all(isinstance(each, list) and len(each) == 2 for each in value))
    found = tuple((_count(first), _count(end)) for first, end in value)
    _demand(all(first < end for first, end in found) and all(a[1] <= b[0] for a, b in pairwise(found)))
    return found


def _merged(found: Sequence[tuple[int, int]]) -> Ranges:
    result: list[tuple[int, int]] = []
    for first, end in sorted(found):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((first, end))
    return tuple(result)


def _cut(value: Any) -> Cut:
    _demand(isinstance(value, dict) and value.keys() == {"order", "epoch", "next", "skip"})
    return Cut(_order(value["order"]), _count(value["epoch"]), _count(value["next"]), ranges(value["skip"]))


def _order(value: Any) -> Order:
    plain, of_phase = ("sequence", "windows", "seed"), ("piece", "first")
    _demand(isinstance(value, Mapping) and value.keys() in ({*plain}, {*plain, *of_phase, "end"}))
    order = Order(*(_count(value[name]) for name in plain))
    _demand(order.sequence > 0 and order.windows > 0)
    if "piece" not in value:
        return order
    piece, first = (_count(value[name]) for name in of_phase)
    end = None if value["end"] is None else _count(value["end"])
    _demand(piece > 0 and piece % order.sequence == 0 and order.windows % (piece // order.sequence) == 0)
    _demand(first % piece == 0 and (end is None or (end > first and end % piece == 0)))
    return replace(order, piece=piece, first=first, end=end)


def _count(value: Any) -> int:
    _demand(type(value) is int and 0 <= value <= _MAX)
    return int(value)


def _demand(condition: bool) -> None:
    if not condition:
        raise ValueError("is no position in the data")
