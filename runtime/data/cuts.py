"""Windows that are cut anew, or put in another order, within an epoch: what of it was seen before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.data.order import Order

MAX_CUTS = 8  # in one epoch; each is looked at for every window that is drawn after it

Ranges = tuple[tuple[int, int], ...]  # [first, end) of indices of samples, ascending


@dataclass(frozen=True)
class EpochCut:
    """What was drawn of an epoch under an earlier order: the samples before `next`, and those in `skip`."""

    order: Order
    epoch: int
    next: int
    skip: Ranges

    def to_json(self) -> dict[str, Any]:
        """The fields, as a checkpoint has them."""
        return vars(self) | {"order": self.order.to_json(), "skip": [list(each) for each in self.skip]}

    def seen(self, first: int, end: int, earlier: Sequence[EpochCut]) -> Iterator[tuple[int, int]]:
        """The parts of the tokens [first, end) that were drawn under this order. `earlier`: cuts before this one."""
        size, windows = self.order.sequence, self.order.windows
        for window in range(first // size, min(windows, -(-end // size))):
            index = self.order.index(window, self.epoch)
            drawn = index < self.next or any(a <= index < b for a, b in self.skip)
            if drawn and not left_out(self.order, index, earlier):
                yield max(first, window * size), min(end, (window + 1) * size)


def left_out(order: Order, index: int, cuts: Sequence[EpochCut]) -> bool:
    """Whether more than half of the sample's window was seen in this epoch under earlier orders."""
    if not cuts or index // order.windows != cuts[0].epoch:
        return False
    return 2 * num_seen(order, index, cuts) > order.sequence


def num_seen(order: Order, index: int, cuts: Sequence[EpochCut]) -> int:
    """How many tokens of the sample's window were seen in this epoch under earlier orders."""
    first, end = order.tokens_of(index)
    parts = sorted(part for k, cut in enumerate(cuts) for part in cut.seen(first, end, cuts[:k]))
    seen, at = 0, first
    for begin, until in parts:
        seen += max(0, until - max(begin, at))
        at = max(at, until)
    return seen
