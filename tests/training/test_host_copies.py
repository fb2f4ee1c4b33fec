"""Schedules with copies to the host, executed: gradients are those of autograd, and memory is what was proven."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from compiler.decide import lower_spec
from compiler.emit.segment_cache import Segments
from compiler.predict.memory import rank_memories
from compiler.schedules.schedule import Schedule
from compiler.spec_files import with_schedule
from dsl.schema import Schedule as Named
from dsl.schema import Spec
from tests.schedules.offloading import offloading
from tests.training.specs import spec
from tests.training.test_differential import STEPS, check
from tests.training.test_memory import measured_peaks


class Case(NamedTuple):
    """A model on some ranks, the schedule, and the share of its peak that is left."""

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


def with_file(chosen: Spec, schedule: Schedule) -> Spec:
    """The spec, as if it named a file with a schedule."""
    return with_schedule(chosen.model_copy(update={"schedule": Named(file="mine.schedule")}), schedule)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_equals_autograd(tmp_path: Path, segments: Segments, case: Case) -> None:
    chosen = with_file(spec(case.pp, case.ep, case.dp, case.micro_batches, STEPS, case.zero, case.of), case.schedule)
    check(tmp_path, segments, {"mine": chosen}, case.pp * case.dp)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_proven_peak_is_the_measured_one_and_lower(tmp_path: Path, segments: Segments, case: Case) -> None:
    """The peak of values on the device is the proven one, to the byte."""
    plain = spec(case.pp, case.ep, case.dp, case.micro_batches, zero=case.zero, of=case.of, schedule=case.name)
    chosen = with_file(plain, case.schedule)
    peaks = measured_peaks(tmp_path, segments, chosen)
    without = lower_spec(plain)
    schedule = without.schedules[f"train_{case.micro_batches}"]
    planned = rank_memories(plain, without.lowering, schedule)
    assert sum(peaks) < case.dp * sum(each.activations + each.buffers for each in planned)
