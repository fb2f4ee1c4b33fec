"""The rate of a shape that is no row: a mean of the rows of its class, the nearer the heavier.

Distances are those of logarithms: a matrix of half the rows is as far away as one of twice as many. A shape that is a
row gets that row's rate. Ranks and bytes of a transfer are interpolated one after the other, and end at the last row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import log2

Point = tuple[tuple[int, ...], float]  # shape, rate


def rate_at(points: Sequence[Point], shape: tuple[int, ...]) -> float:
    """The rate of a shape. `points` is not empty; points without a shape count as being everywhere a factor 2 away."""
    near: list[tuple[float, float]] = []
    for at, rate in points:
        square = sum(log2(a / b) ** 2 for a, b in zip(at, shape, strict=True)) if at and shape else 1.0
        if square == 0:
            return rate
        near.append((1 / square**2, rate))  # many rows far away weigh less than one nearby
    # Times of equal work are averaged, so rates harmonically: a slow row is not hidden by a fast one.
    return sum(weight for weight, _ in near) / sum(weight / rate for weight, rate in near)


def link_rate_at(points: Sequence[Point], ranks: int, moved_bytes: float) -> float:
    """The rate of a transfer between `ranks` of so many bytes a rank."""
    sizes = sorted({at[0] for at, _ in points if at})
    if not sizes:
        return points[0][1]
    known = []
    for size in sizes:
        of_size = sorted((at[1], rate) for at, rate in points if at and at[0] == size)
        known.append((size, _between(of_size, moved_bytes)))
    return _between(known, ranks)


def _between(known: Sequence[tuple[int, float]], at: float) -> float:
    """Linear in the logarithm between neighbours; constant beyond the ends."""
    right = bisect_left([x for x, _ in known], at)
    if right == 0 or right == len(known):
        return known[min(right, len(known) - 1)][1]
    (a, low), (b, high) = known[right - 1], known[right]
    share = log2(at / a) / log2(b / a)
    return low + (high - low) * share
