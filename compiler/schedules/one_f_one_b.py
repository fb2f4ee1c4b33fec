"""1F1B: warm up with forwards, then alternate one forward and one backward (PipeDream-flush, arXiv 2006.09503).

Every P >= 1 and N >= 1, placement `loop(1)`. It runs on a bidirectional plan too: rank s stores stage s there as well,
so every micro-batch goes in direction 0, and the mirrored copies add no gradient.
"""

from __future__ import annotations

from compiler.schedules.schedule import Schedule
from compiler.stage_placement import ONE_STAGE
from runtime.actions import Action, Step


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank r runs min(N, P-1-r) forwards, pairs of F and B, then the remaining backwards; ValueError for P or N < 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ValueError(f"1f1b needs at least 1 rank and 1 micro-batch, got {num_ranks} and {num_micro_batches}")
    ranks = tuple(_rank_steps(num_ranks, num_micro_batches, rank) for rank in range(num_ranks))
    return Schedule("1f1b", num_ranks, num_micro_batches, ONE_STAGE, ranks)


def _rank_steps(num_ranks: int, num_micro_batches: int, rank: int) -> tuple[Step, ...]:
    warm_up = min(num_micro_batches, num_ranks - 1 - rank)
    forwards = [Action("F", rank, k) for k in range(num_micro_batches)]
    backwards = [Action("B", rank, k) for k in range(num_micro_batches)]
    steps: list[Step] = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps += [forward, backward]
    return (*steps, *backwards[num_micro_batches - warm_up :])
