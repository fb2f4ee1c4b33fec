"""Slots: the next step of a rank without its micro-batch, as a kind and a chunk, or as two of them that overlap.

A chunk of a rank is a stage together with the direction of its micro-batches.
"""

from __future__ import annotations

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement
from runtime.contract.actions import ActionKind

Token = tuple[ActionKind, int]  # kind and chunk; a W of chunk -1 is for the oldest deferred gradient of any chunk
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

    Under `bidirectional`, as under `v`, chunk 0 is the one that is nearer to where its micro-batches enter.
    """
    if placement != BIDIRECTIONAL:
        return tuple((stage, 0) for stage in placement.stages_of(num_ranks, rank))
    near = min(rank, num_ranks - 1 - rank)
    direction = int(rank != near)
    return ((near, direction), (num_ranks - 1 - near, 1 - direction))
