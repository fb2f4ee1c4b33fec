"""Interleaved zero bubble: rank r defers r weight gradients, and fills the bubble of the drain with them.

Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)` (torch's ScheduleInterleavedZeroBubble; arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator

from compiler.schedule.interleaved import around_the_ring
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, Token


def interleaved_zb(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Split backwards with deferred weight gradients; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved_zb", num_ranks, num_micro_batches, chunks, _split)


def _split(forwards: list[Token], backwards: list[Token], first_group: int, behind: int, before: int) -> Iterator[Slot]:
    warm_up = min(len(forwards), first_group + behind)
    yield from ((forward,) for forward in forwards[:warm_up])
    for at, (_, chunk) in enumerate(backwards):
        if warm_up + at < len(forwards):
            yield (forwards[warm_up + at],)
        yield (("I", chunk),)
        if at >= before:
            yield (("W", backwards[at - before][1]),)
    yield from ((("W", chunk),) for _, chunk in backwards[max(0, len(backwards) - before) :])
