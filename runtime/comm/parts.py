"""Flat tensors of equal parts, one for each holder: sums of which each has its part, and what all put together.

Both run while others compute. Parts are summed in the order of the holders, as those of a whole bucket are, so that all
transports but NCCL give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.comm.transport import Work, sum_in_order

BLOCK = 1 << 15  # elements of more than two tensors summed at a time, so that the sum stays in the cache


@dataclass(frozen=True)
class Summed:
    """What is in flight are the parts that holders have of this one's place; their sum goes to the part `out`."""

    works: Sequence[Work]
    parts: Sequence[Tensor]  # in the order of the holders
    out: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        sum_parts(self.parts, self.out)


@dataclass(frozen=True)
class All:
    """Several things in flight, as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum flat tensors of one size, in their order. `out` may be one of them."""
    size = BLOCK if len(parts) > 2 else max(1, out.numel())
    is_read_late = any(out.data_ptr() == part.data_ptr() for part in parts[2:])  # after the first two were summed
    for at in range(0, out.numel(), size):
        block = slice(at, at + size)
        place = out[block]
        total = sum_in_order([part[block] for part in parts], None if is_read_late else place)
        if is_read_late:
            place.copy_(total)
