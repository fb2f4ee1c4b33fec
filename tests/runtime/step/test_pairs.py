"""Every kind of pair, executed: two data ranks that exchange experts' rows run a handwritten schedule of pairs."""

from __future__ import annotations

from pathlib import Path

from compiler.emit.segment_cache import Segments
from compiler.plan.spec_files import with_schedule
from compiler.schedule.costs import PAIR_KINDS
from compiler.schedule.schedule import Schedule
from dsl.schema import ScheduleBlock as Named
from tests.compiler.program.lower.stages import pair_kinds
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check

MINE = """\
# mine ranks=1 micro_batches=10 placement=loop(1)
(F0.0|F0.1) (F0.2|B0.0) (I0.1|F0.3) (W0.1|F0.4) (B0.2|B0.3) (F0.5|F0.6) (I0.4|I0.5) (W0.4|B0.6) \
(F0.7|W0.5) (F0.8|F0.9) (B0.7|I0.8) (I0.9|W0.8) W0.9
"""
ANOTHER = (
    "# mine ranks=1 micro_batches=4 placement=loop(1)\nF0.0 F0.1 (I0.0|I0.1) (W0.0|W0.1) (F0.2|F0.3) (B0.3|B0.2)\n"
)


def test_every_pair_of_actions_equals_autograd(tmp_path: Path, segments: Segments) -> None:
    schedules = [Schedule.from_text(text) for text in (MINE, ANOTHER)]
    assert frozenset().union(*map(pair_kinds, schedules)) == set(PAIR_KINDS)
    for schedule in schedules:
        schedule.check()
        n = schedule.num_micro_batches
        named = spec(1, 2, 2, n, STEPS).model_copy(update={"schedule": Named(file="mine.schedule")})
        folder = tmp_path / f"n{n}"
        folder.mkdir()
        check(folder, segments, {"mine": with_schedule(named, schedule)}, 2)
