"""Interleaved 1F1B: smaller stages, several a rank, for a shorter fill and drain (Megatron, arXiv 2104.04473, §2.2).

Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)`. Micro-batches go round the ring in groups, each v times;
the paper has groups of P and wants P to divide N. Here N is divided into N // P groups as equal as can be (one, if
N < P), the larger ones first: a later group that is larger would need more warm-up than there was, and ranks would wait
in a circle.
"""

from __future__ import annotations

from itertools import accumulate

from compiler.schedules.schedule import Schedule
from compiler.stage_placement import loop
from runtime.actions import Action, Step


def interleaved(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """1F1B over the forwards and backwards of all chunks of a rank; ValueError for P or N < 1, chunks < 2."""
    P, N = num_ranks, num_micro_batches
    if P < 1 or N < 1:
        raise ValueError(f"interleaved needs at least 1 rank and 1 micro-batch, got {P} and {N}")
    if chunks < 2:
        raise ValueError(f"interleaved needs at least 2 chunks, got {chunks}: use 2, or 1f1b")
    ranks = tuple(_rank_steps(P, N, chunks, rank) for rank in range(P))
    return Schedule("interleaved", P, N, loop(chunks), ranks)


def group_sizes(num_ranks: int, num_micro_batches: int) -> tuple[int, ...]:
    """How many micro-batches go round together: at least P, if there are so many."""
    groups = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, groups)
    return (size + 1,) * larger + (size,) * (groups - larger)


def _rank_steps(num_ranks: int, num_micro_batches: int, chunks: int, rank: int) -> tuple[Step, ...]:
    sizes = group_sizes(num_ranks, num_micro_batches)
    order: list[tuple[int, int]] = []  # (chunk, micro-batch) of the forwards
    for first, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        order += [(chunk, first + i) for chunk in range(chunks) for i in range(size)]
    forwards: list[Step] = [Action("F", chunk * num_ranks + rank, k) for chunk, k in order]
    backwards: list[Step] = [Action("B", (chunks - 1 - chunk) * num_ranks + rank, k) for chunk, k in order]
    # The first backward comes when the first group is in its last chunk, and its gradient has come down to this rank.
    warm_up = min(len(order), (chunks - 1) * sizes[0] + 2 * (num_ranks - 1 - rank))
    steps = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps += [forward, backward]
    return (*steps, *backwards[len(order) - warm_up :])
