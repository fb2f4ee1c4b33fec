"""Interleaved 1F1B in pairs: one forward more at the start, so that each backward can overlap with the next forward.

That forward is of another micro-batch, so that each hides what the other communicates (Megatron's
`--overlap-moe-expert-parallel-comm`). Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)`.
"""

from __future__ import annotations

from collections.abc import Iterator

from compiler.schedule.interleaved import around_the_ring
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, Token


def interleaved_pairs(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Backwards that overlap with the next forward; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved_pairs", num_ranks, num_micro_batches, chunks, _in_pairs)


def _in_pairs(
    forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int
) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + 2 * behind + 1)
    yield from ((forward,) for forward in forwards[:warm_up])
    for at, backward in enumerate(backwards, warm_up):
        yield (forwards[at], backward) if at < len(forwards) else (backward,)
