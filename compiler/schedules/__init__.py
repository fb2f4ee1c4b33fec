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
