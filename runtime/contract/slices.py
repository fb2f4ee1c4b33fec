"""Slices of logical tensors that are sharded over tensor ranks: ranges along one dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from runtime.contract.recipe import Amount, Count


@dataclass(frozen=True)
class Slice:
    """Ranges [begin, end) of a logical tensor along a dimension, ascending and disjoint. A rank holds them
    concatenated, as one tensor.

    A fused product has several ranges: of the rows [queries | keys | values] a rank holds some of each.
    """

    dimension: Amount
    ranges: tuple[tuple[Amount, Count], ...]

    @property
    def extent(self) -> int:
        """Held extent along the dimension."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def text(self) -> str:
        """Short text of the slice: 0:0-64,128-160."""
        return f"{self.dimension}:{','.join(f'{begin}-{end}' for begin, end in self.ranges)}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a proper slice of tensors with a shape."""
        if self.dimension >= len(shape) or not self.ranges:
            return False
        ends = [0, *(place for span in self.ranges for place in span), shape[self.dimension]]
        inside = all(a < b for a, b in pairwise(ends[1:-1])) and ends[-2] <= ends[-1]
        return inside and self.extent < shape[self.dimension]


def held_shape(shape: tuple[int, ...], held_slice: Slice | None) -> tuple[int, ...]:
    """Return the shape of a slice of a tensor of `shape`; None for the whole tensor."""
    return (
        shape
        if held_slice is None
        else (*shape[: held_slice.dimension], held_slice.extent, *shape[held_slice.dimension + 1 :])
    )


def held_elements(shape: tuple[int, ...], held_slice: Slice | None) -> int:
    """Return the number of elements of a slice of a tensor of `shape`."""
    return math.prod(held_shape(shape, held_slice))


def tiling_problem(shape: tuple[int, ...], slices: Iterable[Slice | None]) -> str:
    """Return why slices do not have each element of a tensor exactly once, or "". O(n log n)."""
    parts = list(slices)
    if parts == [None]:
        return ""
    several = [part for part in parts if part is not None]
    if len(several) < len(parts):
        return "all of it is held twice"
    if len({part.dimension for part in several}) > 1:
        return "its slices are along several dimensions"
    covered, extent = 0, shape[several[0].dimension] if several else 0
    for begin, end in sorted(span for part in several for span in part.ranges):
        if begin != covered:
            return (
                f"{min(covered, begin)} to {max(covered, begin)} are {'held twice' if begin < covered else 'missing'}"
            )
        covered = end
    return "" if several and covered == extent else f"{covered} to {extent} are missing"
