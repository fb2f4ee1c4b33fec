"""Windows that change within an epoch (another length or another order): which tokens were seen before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.data.order import Order

MAX_CUTS = 8  # in one epoch; every window drawn later checks each of them

Ranges = tuple[tuple[int, int], ...]  # [first, end) of indices of samples, ascending


@dataclass(frozen=True)
class EpochCut:
    """The samples of an epoch that were drawn under an earlier order: those before `next`, and those in `skip`."""

    order: Order
    epoch: int
    next: int
    skip: Ranges

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a checkpoint."""
        return vars(self) | {"order": self.order.to_json(), "skip": [list(span) for span in self.skip]}

    def drawn_spans(self, first: int, end: int, earlier: Sequence[EpochCut]) -> Iterator[tuple[int, int]]:
        """Yield the parts of tokens [first, end) that were drawn under this order. `earlier`: cuts before this one."""
        size, windows = self.order.sequence, self.order.windows
        for window in range(first // size, min(windows, -(-end // size))):
            index = self.order.index(window, self.epoch)
            drawn = index < self.next or any(a <= index < b for a, b in self.skip)
            if drawn and not is_left_out(self.order, index, earlier):
                yield max(first, window * size), min(end, (window + 1) * size)


def is_left_out(order: Order, index: int, cuts: Sequence[EpochCut]) -> bool:
    """Whether more than half of the sample's window was seen in this epoch under earlier orders."""
    if not cuts or index // order.windows != cuts[0].epoch:
        return False
    return 2 * num_seen(order, index, cuts) > order.sequence


def num_seen(order: Order, index: int, cuts: Sequence[EpochCut]) -> int:
    """Return how many tokens of the sample's window were seen in this epoch under earlier orders."""
    first, end = order.tokens_of(index)
    parts = sorted(part for k, cut in enumerate(cuts) for part in cut.drawn_spans(first, end, cuts[:k]))
    count, position = 0, first
    for begin, until in parts:
        count += max(0, until - max(begin, position))
        position = max(position, until)
    return count
