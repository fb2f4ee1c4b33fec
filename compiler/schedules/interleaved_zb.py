"""Interleaved zero bubble: rank r defers r weight gradients, and fills the bubble of the drain with them.

Every P >= 1, N >= 1 and v >= 2 chunks, placement `loop(v)` (torch's ScheduleInterleavedZeroBubble; arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from compiler.schedules.interleaved import around_the_ring
from compiler.schedules.schedule import Schedule
from runtime.actions import Action, Step


def interleaved_zb(num_ranks: int, num_micro_batches: int, chunks: int) -> Schedule:
    """Split backwards with deferred weight gradients; ValueError for P or N < 1, chunks < 2."""
    return around_the_ring("interleaved_zb", num_ranks, num_micro_batches, chunks, _split)


def _split(
    forwards: list[Action], backwards: list[Action], first_group: int, behind: int, before: int
) -> Iterator[Step]:
    warm_up = min(len(forwards), first_group + behind)
    yield from forwards[:warm_up]
    for at, backward in enumerate(backwards):
        yield from forwards[warm_up + at : warm_up + at + 1]
        yield replace(backward, kind="I")
        if at >= before:
            yield replace(backwards[at - before], kind="W")
    yield from (replace(backward, kind="W") for backward in backwards[max(0, len(backwards) - before) :])
