"""What messages between two ranks take, where that depends on the ranks: by node, or by a table."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Links:
    """Times of messages that are not the same between all ranks.

    `node`: how many neighbouring ranks share one, 0 if all do; `between`: the time from one node to another. `table`:
    by rank and rank, the same both ways; where it is given, nothing else counts.
    """

    node: int = 0
    between: Fraction = Fraction(0)
    table: tuple[tuple[Fraction, ...], ...] = ()

    def time(self, source: int, target: int, inside: Fraction) -> Fraction:
        """Time of a message from a rank to another; inside of a node it is `inside`."""
        if self.table:
            return self.table[source][target]
        return self.between if self.node and source // self.node != target // self.node else inside

    def least(self, num_ranks: int, inside: Fraction) -> Fraction:
        """The least time of a message between two ranks."""
        ranks = range(num_ranks)
        return min((self.time(a, b, inside) for a in ranks for b in ranks if a != b), default=Fraction(0))

    def visit_all(self, num_ranks: int, inside: Fraction) -> Fraction:
        """A time below that of messages on any way through all ranks: the shortest tree that joins them."""
        if not self.node and not self.table:
            return (num_ranks - 1) * inside
        total, near = Fraction(0), {rank: self.time(0, rank, inside) for rank in range(1, num_ranks)}
        while near:
            rank = min(near, key=near.__getitem__)
            total += near.pop(rank)
            near = {other: min(time, self.time(rank, other, inside)) for other, time in near.items()}
        return total


ALIKE = Links()
