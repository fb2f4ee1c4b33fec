"""What a rank does next, without a micro-batch: a kind and a chunk, or two of them that overlap.

A chunk of a rank is a stage and the direction of the micro-batches that it takes.
"""

from __future__ import annotations

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from runtime.contract.actions import ActionKind

Token = tuple[ActionKind, int]  # kind and chunk; a W of chunk -1 is of any
Slot = tuple[Token, ...]  # one token, or the two of a pair
Home = tuple[int, int]  # a stage, and the direction in which its micro-batches run
F0: Token = ("F", 0)
F1: Token = ("F", 1)
B0: Token = ("B", 0)
B1: Token = ("B", 1)
I0: Token = ("I", 0)
I1: Token = ("I", 1)
W0: Token = ("W", 0)
W1: Token = ("W", 1)
W: Token = ("W", -1)


def homes(placement: StagePlacement, num_ranks: int, rank: int) -> tuple[Home, ...]:
    """By chunk of a rank, its stage and the direction of its micro-batches.

    Under `bidirectional`, chunk 0 is that which is nearer to where its micro-batches enter, as it is under `v`.
    """
    if placement != BIDIRECTIONAL:
        return tuple((stage, 0) for stage in placement.stages_of(num_ranks, rank))
    near = min(rank, num_ranks - 1 - rank)
    direction = int(rank != near)
    return ((near, direction), (num_ranks - 1 - near, 1 - direction))
