"""What a rank holds of a logical tensor that tensor ranks split: ranges of it along one dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from runtime.contract.recipe import Amount, Count


@dataclass(frozen=True)
class Slice:
    """Ranges [begin, end) of a logical tensor along a dimension, ascending and apart. A rank holds them one behind the
    other, as one tensor.

    There are several where a product is fused: of the rows [queries | keys | values] a rank holds some of each.
    """

    dimension: Amount
    ranges: tuple[tuple[Amount, Count], ...]

    @property
    def extent(self) -> int:
        """What is held along the dimension."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def text(self) -> str:
        """The slice in a few letters: 0:0-64,128-160."""
        return f"{self.dimension}:{','.join(f'{begin}-{end}' for begin, end in self.ranges)}"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it is a slice of tensors of a shape, and not all of one."""
        if self.dimension >= len(shape) or not self.ranges:
            return False
        ends = [0, *(place for each in self.ranges for place in each), shape[self.dimension]]
        inside = all(a < b for a, b in pairwise(ends[1:-1])) and ends[-2] <= ends[-1]
        return inside and self.extent < shape[self.dimension]


def held_shape(shape: tuple[int, ...], of: Slice | None) -> tuple[int, ...]:
    """The shape of what a rank holds of a tensor of `shape`; None: all of it."""
    return shape if of is None else (*shape[: of.dimension], of.extent, *shape[of.dimension + 1 :])


def held_elements(shape: tuple[int, ...], of: Slice | None) -> int:
    """The elements that a rank holds of a tensor of `shape`."""
    return math.prod(held_shape(shape, of))


def tiling_problem(shape: tuple[int, ...], slices: Iterable[Slice | None]) -> str:
    """Why slices are not all of a tensor, each of its elements in one of them; "" if they are. O(n log n)."""
    given = list(slices)
    if given == [None]:
        return ""
    several = [each for each in given if each is not None]
    if len(several) < len(given):
        return "all of it is held twice"
    if len({each.dimension for each in several}) > 1:
        return "its slices are along several dimensions"
    at, extent = 0, shape[several[0].dimension] if several else 0
    for begin, end in sorted(each for one in several for each in one.ranges):
        if begin != at:
            return f"{min(at, begin)} to {max(at, begin)} are {'held twice' if begin < at else 'missing'}"
        at = end
    return "" if several and at == extent else f"{at} to {extent} are missing"
