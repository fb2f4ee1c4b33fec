"""ZB1P, the hand-made schedule ZB-H1: 1f1b with weight gradients in the bubble (Zero Bubble, arXiv 2401.10241, §3.1).

Every P >= 1 and N >= 1, placement `loop(1)`. No rank holds more than P activations, which is what the first rank of
1f1b holds: rank r defers each W by r micro-batches, as many as its warm-up is shorter.
"""

from __future__ import annotations

from compiler.ir.stage_placement import ONE_STAGE
from compiler.schedule.numbering import numbered
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import F0, I0, W0, Slot


def zb1p(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r: min(N, P-1-r) forwards, then F, I and the W of r micro-batches ago by turns; ValueError below 1."""
    return deferred("zb1p", num_ranks, num_micro_batches, 1)


def deferred(name: str, num_ranks: int, num_micro_batches: int, times: int) -> Schedule:
    """Rank r: so many times P-1-r forwards, or N, then F, I and the W of `times` · r micro-batches ago by turns."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    return numbered(
        name,
        num_ranks,
        num_micro_batches,
        ONE_STAGE,
        lambda rank: _slots(num_micro_batches, times * (num_ranks - 1 - rank), times * rank),
    )


def _slots(num_micro_batches: int, warm_up: int, late: int) -> list[Slot]:
    N, warm_up = num_micro_batches, min(num_micro_batches, warm_up)
    slots: list[Slot] = [(F0,)] * warm_up
    for k in range(N):
        if warm_up + k < N:
            slots += [(F0,)]
        slots += [(I0,)]
        if k >= late:
            slots += [(W0,)]
    return slots + [(W0,)] * min(N, late)
