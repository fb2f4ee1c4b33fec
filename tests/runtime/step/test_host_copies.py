"""Schedules with copies to the host, executed: gradients equal autograd's, and memory is as proven."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

from compiler.emit.segment_cache import Segments
from compiler.pipeline import lower_spec
from compiler.plan.spec_files import with_schedule
from compiler.predict.memory import host_buffers, rank_memories
from compiler.predict.times import step_times
from compiler.program.lowered import LoweredPlan
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import has_copies, peak_activations, simulate
from dsl.schema import ScheduleBlock as Named
from dsl.schema import Spec
from tests.compiler.schedule.offloading import offloading
from tests.runtime.step.specs import spec
from tests.runtime.step.test_differential import STEPS, check
from tests.runtime.step.test_memory import measured_peaks


class Case(NamedTuple):
    """A model on some ranks, the schedule, and the allowed share of its peak."""

    of: str
    pp: int
    ep: int
    dp: int
    zero: int
    micro_batches: int
    name: str
    share: Fraction

    @property
    def schedule(self) -> Schedule:
        return offloading(self.name, self.pp, self.micro_batches, self.share)


CASES = [
    Case("v3", 2, 2, 2, 0, 6, "zbh2", Fraction(2, 3)),
    Case("llama", 2, 1, 1, 0, 6, "gpipe", Fraction(1, 3)),
    Case("v3", 2, 2, 2, 3, 4, "zbv", Fraction(3, 4)),
    Case("qwen", 2, 2, 2, 0, 6, "dualpipev", Fraction(9, 10)),
]


def searched(placement: Literal["v", "bidirectional"], cap: int, of: str, ranks: int = 2, batch: int = 6) -> Spec:
    """A spec whose copies `auto` places."""
    auto = Named(name="auto", placement=placement, cap=Fraction(cap), host_copies=True)
    return spec(ranks, 1, 1, batch, STEPS, of=of).model_copy(update={"schedule": auto})


SEARCHED = {
    "v": searched("v", 1, "llama", batch=4),
    "bidirectional": searched("bidirectional", 2, "v3", 4, 8),
}


@cache
def found(name: str) -> LoweredPlan:
    """The result of the search for such a spec, which takes some 10 s."""
    return lower_spec(SEARCHED[name])


@pytest.mark.parametrize(("name", "ranks"), [("v", 2), ("bidirectional", 4)])
def test_copies_that_a_spec_asks_for(tmp_path: Path, segments: Segments, name: str, ranks: int) -> None:
    """They are placed by the search, and shorter; gradients are those of autograd, also with two copies of stages."""
    chosen, times = SEARCHED[name], {}
    without = chosen.model_copy(update={"schedule": chosen.schedule.model_copy(update={"host_copies": False})})
    for copies, lowered in ((True, found(name)), (False, lower_spec(without))):
        schedule = lowered.main_schedule
        assert has_copies(schedule) == copies and lowered.certificates.keys() == lowered.schedules.keys()
        assert max(peak_activations(schedule)) <= 2
        times[copies] = simulate(schedule, step_times(lowered.lowering, schedule)).makespan
    assert times[True] < times[False]
    check(tmp_path, segments, {"auto": with_file(chosen, found(name).main_schedule)}, ranks)


def test_host_buffers_equal_the_plan(tmp_path: Path, segments: Segments) -> None:
    chosen = with_file(SEARCHED["v"], found("v").main_schedule)
    measured_peaks(tmp_path, segments, chosen)
    lowered = lower_spec(chosen)
    for rank in range(2):
        num_bytes = json.loads((tmp_path / f"rank_{rank}.json").read_text())["host_bytes"]
        assert num_bytes == host_buffers(chosen, lowered.lowering, lowered.main_schedule, rank) > 0


def with_file(chosen: Spec, schedule: Schedule) -> Spec:
    """The spec, as if it named a file with a schedule."""
    return with_schedule(chosen.model_copy(update={"schedule": Named(file="mine.schedule")}), schedule)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_equals_autograd(tmp_path: Path, segments: Segments, case: Case) -> None:
    chosen = with_file(spec(case.pp, case.ep, case.dp, case.micro_batches, STEPS, case.zero, case.of), case.schedule)
    check(tmp_path, segments, {"mine": chosen}, case.pp * case.dp)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_proven_peak_is_the_measured_one_and_lower(tmp_path: Path, segments: Segments, case: Case) -> None:
    """The peak of values on the device equals the proven one, to the byte."""
    plain = spec(case.pp, case.ep, case.dp, case.micro_batches, zero=case.zero, of=case.of, schedule=case.name)
    chosen = with_file(plain, case.schedule)
    peaks = measured_peaks(tmp_path, segments, chosen)
    without = lower_spec(plain)
    schedule = without.schedules[f"train_{case.micro_batches}"]
    planned = rank_memories(plain, without.lowering, schedule)
    assert sum(peaks) < case.dp * sum(memory.activations + memory.buffers for memory in planned)
