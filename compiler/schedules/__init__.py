"""Pipeline schedules: pure functions from sizes to a `Schedule`, one file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable

from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.one_f_one_b import one_f_one_b
from compiler.schedules.schedule import Schedule

# Names as the language spells them -> (num_ranks, num_micro_batches) -> Schedule; ValueError for a size it has not.
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "dualpipe": dualpipe,
}


def schedule_of(name: str, num_ranks: int, num_micro_batches: int) -> Schedule:
    """The schedule of a name, or 1f1b on the same storage where dualpipe has too few micro-batches (a ramp's first)."""
    if name == "dualpipe" and num_micro_batches < 2 * num_ranks:
        return one_f_one_b(num_ranks, num_micro_batches)
    return SCHEDULES[name](num_ranks, num_micro_batches)
