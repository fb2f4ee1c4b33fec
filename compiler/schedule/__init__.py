"""Pipeline schedules: pure functions from sizes to a `Schedule`, and the table of them.

Facts about a schedule that hold for all sizes are in its row of `dsl.facts.schedules`. `auto` is in neither table: the
solver searches for it (compiler/schedule/solver), on the placement that `stage_placement_of_spec` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule.dualpipe import dualpipe, dualpipev
from compiler.schedule.one_f_one_b import gpipe, interleaved, interleaved_pairs, one_f_one_b
from compiler.schedule.schedule import Schedule
from compiler.schedule.zero_bubble import interleaved_zb, vhalf, vmin, zb1p, zbh2, zbv, zbv_both_ways
from dsl.facts.schedules import AUTO, DEFAULT_CHUNKS, FACTS, ScheduleFacts

if TYPE_CHECKING:  # `dsc schedule` of a name alone reads no spec
    from dsl.schema import ScheduleBlock

__all__ = ["AUTO", "DEFAULT_CHUNKS", "SCHEDULES", "NamedSchedule", "schedule_of", "schedule_of_block", "stand_in"]

MAKERS: dict[str, Callable[..., Schedule]] = {  # called with (num_ranks, num_micro_batches), and chunks if chunked
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "interleaved_pairs": interleaved_pairs,
    "interleaved_zb": interleaved_zb,
    "zb1p": zb1p,
    "zbh2": zbh2,
    "vmin": vmin,
    "vhalf": vhalf,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "dualpipe": dualpipe,
}


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule of the language: its facts, and the function that makes it."""

    facts: ScheduleFacts
    make: Callable[..., Schedule]

    def generate(self, num_ranks: int, num_micro_batches: int, chunks: int = DEFAULT_CHUNKS) -> Schedule:
        """Make the schedule. `chunks` counts only for chunked schedules.

        Raises ValueError for a size that the schedule does not have, with what to change.
        """
        chosen = (chunks,) if self.facts.is_chunked else ()
        return self.make(num_ranks, num_micro_batches, *chosen)

    def stage_placement(self, chunks: int = DEFAULT_CHUNKS) -> StagePlacement:
        """The placement of its stages. `chunks` counts only for chunked schedules."""
        return loop(chunks) if self.facts.is_chunked else StagePlacement.parse(self.facts.placement)

    def least_micro_batches(self, num_ranks: int) -> int:
        """The least number of micro-batches of the schedule; at least 1."""
        return max(1, self.facts.fewest_micro_batches * num_ranks)

    def has_size(self, num_ranks: int, num_micro_batches: int) -> bool:
        """Whether the schedule has this size."""
        unit = self.facts.multiple
        divisible = num_ranks % unit == 0 and num_micro_batches % unit == 0
        return divisible and num_ranks >= 1 and num_micro_batches >= self.least_micro_batches(num_ranks)


SCHEDULES: dict[str, NamedSchedule] = {name: NamedSchedule(FACTS[name], make) for name, make in MAKERS.items()}


@lru_cache(maxsize=32)  # a plan asks for its schedule several times, and so does each edit that is tried on it
def schedule_of(name: str, num_ranks: int, num_micro_batches: int, chunks: int = DEFAULT_CHUNKS) -> Schedule:
    """The schedule of a name, or a stand-in on the same stages if it needs more micro-batches (early in a ramp)."""
    row = SCHEDULES[name]
    if num_micro_batches < row.least_micro_batches(num_ranks):
        return stand_in(row.stage_placement(chunks), num_ranks, num_micro_batches)
    return row.generate(num_ranks, num_micro_batches, chunks)


def schedule_of_block(block: ScheduleBlock, num_ranks: int, num_micro_batches: int) -> Schedule:
    """The schedule that a spec names; `auto` and files are found elsewhere. See `schedule_of`."""
    assert block.name is not None, "a schedule has a name or a file"
    return _deferring(block.name, num_ranks, num_micro_batches, block.chunks or DEFAULT_CHUNKS, block.deferred)


@lru_cache(maxsize=32)
def _deferring(name: str, num_ranks: int, num_micro_batches: int, chunks: int, deferred: int | None) -> Schedule:
    return schedule_of(name, num_ranks, num_micro_batches, chunks).deferring_at_most(deferred)


def stand_in(placement: StagePlacement, num_ranks: int, num_micro_batches: int, prompt: bool = True) -> Schedule:
    """A schedule of any number of micro-batches on a placement, for sizes that the spec's schedule does not have.

    It aims to fit in the memory of the spec's schedule rather than to be the fastest, unless `prompt` is off; see
    zero_bubble.py.
    """
    if placement == BIDIRECTIONAL:
        return zbv_both_ways(num_ranks, num_micro_batches, prompt)
    if placement == V:
        return zbv(num_ranks, num_micro_batches, prompt)
    chunks = placement.loops
    return zb1p(num_ranks, num_micro_batches) if chunks == 1 else interleaved(num_ranks, num_micro_batches, chunks)
