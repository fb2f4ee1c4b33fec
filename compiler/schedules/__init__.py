"""Pipeline schedules: pure functions from sizes to a `Schedule`, one file each, and the table of their names.

`auto` is not in the table: it is solved for (compiler/solver), and stores what `placement_of` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.dualpipev import dualpipev
from compiler.schedules.gpipe import gpipe
from compiler.schedules.interleaved import interleaved
from compiler.schedules.one_f_one_b import one_f_one_b
from compiler.schedules.placement import BIDIRECTIONAL, V, loops
from compiler.schedules.schedule import Schedule
from compiler.schedules.zb1p import zb1p
from compiler.schedules.zbv import zbv, zbv_both_ways

AUTO = "auto"
DEFAULT_CHUNKS = 2  # stages a rank, of a schedule that lets one choose


@dataclass(frozen=True)
class Row:
    """A named schedule: how it is made, where its stages are stored, which sizes it has."""

    make: Callable[..., Schedule]  # (num_ranks, num_micro_batches), and chunks if it is chunked
    stored: str  # its placement; `loop` stands for loop(chunks)
    chunked: bool = False
    even: bool = False  # whether ranks and micro-batches must be even numbers
    fewest: int = 0  # micro-batches it needs for each rank; at least 1 in all

    def generate(self, num_ranks: int, num_micro_batches: int, chunks: int = DEFAULT_CHUNKS) -> Schedule:
        """The schedule; ValueError for a size it does not have, with what to change. `chunks` is read if chunked."""
        sizes = (num_ranks, num_micro_batches, chunks) if self.chunked else (num_ranks, num_micro_batches)
        return self.make(*sizes)

    def placement(self, chunks: int = DEFAULT_CHUNKS) -> str:
        """What each rank stores (placement.py)."""
        return f"loop({chunks})" if self.chunked else self.stored

    def has(self, num_ranks: int, num_micro_batches: int) -> bool:
        """Whether `generate` has this size."""
        fits = num_ranks >= 1 and num_micro_batches >= max(1, self.fewest * num_ranks)
        return fits and not (self.even and (num_ranks % 2 or num_micro_batches % 2))


SCHEDULES: dict[str, Row] = {  # names as the language spells them
    "gpipe": Row(gpipe, "loop(1)"),
    "1f1b": Row(one_f_one_b, "loop(1)"),
    "interleaved": Row(interleaved, "loop", chunked=True),
    "zb1p": Row(zb1p, "loop(1)"),
    "zbv": Row(zbv, V),
    "dualpipev": Row(dualpipev, V, fewest=2),
    "dualpipe": Row(dualpipe, BIDIRECTIONAL, even=True, fewest=2),
}


def placement_of(name: str, num_ranks: int, chunks: int = DEFAULT_CHUNKS, folded: bool = True) -> str:
    """What the ranks store under a schedule of the language.

    `auto` mirrors the stages where it can, P being even; else it folds them, two a rank, if there are so many.
    """
    if name == AUTO:
        return BIDIRECTIONAL if num_ranks % 2 == 0 else V if folded else "loop(1)"
    return SCHEDULES[name].placement(chunks)


def schedule_of(name: str, num_ranks: int, num_micro_batches: int, chunks: int = DEFAULT_CHUNKS) -> Schedule:
    """The schedule of a name, or where it has too few micro-batches (a ramp's first) what runs on the same storage."""
    row = SCHEDULES[name]
    if num_micro_batches < row.fewest * num_ranks:
        return stand_in(row.placement(chunks), num_ranks, num_micro_batches)
    return row.generate(num_ranks, num_micro_batches, chunks)


def stand_in(placement: str, num_ranks: int, num_micro_batches: int, prompt: bool = True) -> Schedule:
    """A schedule of any number of micro-batches on a storage: for the sizes that the spec's own does not have.

    It is to fit where the spec's own does, rather than to be the fastest; not if `prompt` is off (zbv.py).
    """
    if placement == BIDIRECTIONAL:
        return zbv_both_ways(num_ranks, num_micro_batches, prompt)
    if placement == V:
        return zbv(num_ranks, num_micro_batches, prompt)
    chunks = loops(placement)
    return zb1p(num_ranks, num_micro_batches) if chunks == 1 else interleaved(num_ranks, num_micro_batches, chunks)
