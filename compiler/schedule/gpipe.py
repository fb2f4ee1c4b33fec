"""GPipe: all forwards, then all backwards (arXiv 1811.06965). Every rank holds all N activations in between.

Every P >= 1 and N >= 1, placement `loop(1)`.
"""

from __future__ import annotations

from compiler.ir.stage_placement import ONE_STAGE
from compiler.schedule.numbering import numbered
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import B0, F0


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Each rank runs F of all micro-batches in order, then B of all in the same order; ValueError for P or N < 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"gpipe needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    order = ((F0,),) * num_micro_batches + ((B0,),) * num_micro_batches
    return numbered("gpipe", num_ranks, num_micro_batches, ONE_STAGE, lambda rank: order)
