"""1F1B: warm up with forwards, then alternate one forward and one backward (PipeDream-flush, arXiv 2006.09503).

Every P >= 1 and N >= 1, placement `loop(1)`. It runs on a bidirectional plan too: rank s stores stage s there as well,
so every micro-batch goes in direction 0, and the mirrored copies add no gradient.
"""

from __future__ import annotations

from compiler.ir.stage_placement import ONE_STAGE
from compiler.schedule.numbering import numbered
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import B0, F0, Slot


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r runs min(N, P-1-r) forwards, pairs of F and B, then the remaining backwards; ValueError for P or N < 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"1f1b needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")

    def slots(rank: int) -> tuple[Slot, ...]:
        warm_up = min(num_micro_batches, num_ranks - 1 - rank)
        return ((F0,),) * warm_up + ((F0,), (B0,)) * (num_micro_batches - warm_up) + ((B0,),) * warm_up

    return numbered("1f1b", num_ranks, num_micro_batches, ONE_STAGE, slots)
