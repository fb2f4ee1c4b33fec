"""ZB1P, the hand-made schedule ZB-H1: 1f1b with weight gradients in the bubble (Zero Bubble, arXiv 2401.10241, §3.1).

Every P >= 1 and N >= 1, placement `loop(1)`. No rank holds more than P activations, which is what the first rank of
1f1b holds: rank r defers each W by r micro-batches, as many as its warm-up is shorter.
"""

from __future__ import annotations

from compiler.schedules.schedule import Schedule
from compiler.stage_placement import ONE_STAGE
from runtime.actions import Action, Step


def zb1p(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r: min(N, P-1-r) forwards, then F, I and the W of r micro-batches ago by turns; ValueError below 1."""
    return deferred("zb1p", num_ranks, num_micro_batches, 1)


def deferred(name: str, num_ranks: int, num_micro_batches: int, times: int) -> Schedule:
    """Rank r: so many times P-1-r forwards, or N, then F, I and the W of `times` · r micro-batches ago by turns."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"{name} needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    ranks = tuple(
        _rank_steps(num_micro_batches, rank, times * (num_ranks - 1 - rank), times * rank) for rank in range(num_ranks)
    )
    return Schedule(name, num_ranks, num_micro_batches, ONE_STAGE, ranks)


def _rank_steps(num_micro_batches: int, rank: int, warm_up: int, late: int) -> tuple[Step, ...]:
    N, warm_up = num_micro_batches, min(num_micro_batches, warm_up)
    steps: list[Step] = [Action("F", rank, k) for k in range(warm_up)]
    for k in range(N):
        if warm_up + k < N:
            steps += [Action("F", rank, warm_up + k)]
        steps += [Action("I", rank, k)]
        if k >= late:
            steps += [Action("W", rank, k - late)]
    return (*steps, *(Action("W", rank, k) for k in range(max(0, N - late), N)))
