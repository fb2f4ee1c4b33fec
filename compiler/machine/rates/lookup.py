"""The rate of a shape that is no row: a mean of the rows of its class, the nearer the heavier.

Distances are those of logarithms: a matrix of half the rows is as far away as one of twice as many. A shape that is a
row gets that row's rate. Of transfers: compiler/machine/topology/links.py.
"""

from __future__ import annotations

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
