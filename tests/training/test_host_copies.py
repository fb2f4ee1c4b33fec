"""Schedules with copies to the host, executed: gradients are those of autograd, and memory is what was proven."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

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

# the model, pipeline, expert and data ranks, ZeRO, micro-batches, the schedule, and the share of its peak that is left
CASES = [
    ("v3", 2, 2, 2, 0, 6, "zbh2", Fraction(2, 3)),
    ("llama", 2, 1, 1, 0, 6, "gpipe", Fraction(1, 3)),
    ("v3", 2, 2, 2, 3, 4, "zbv", Fraction(3, 4)),
    ("qwen", 2, 2, 2, 0, 6, "dualpipev", Fraction(9, 10)),
]


def with_file(chosen: Spec, schedule: Schedule) -> Spec:
    """The spec, as if it named a file with a schedule."""
    return with_schedule(chosen.model_copy(update={"schedule": Named(file="mine.schedule")}), schedule)


@pytest.mark.parametrize(("of", "pp", "ep", "dp", "zero", "n", "name", "share"), CASES)
def test_training_equals_autograd(
    tmp_path: Path,
    segments: Segments,
    of: str,
    pp: int,
    ep: int,
    dp: int,
    zero: int,
    n: int,
    name: str,
    share: Fraction,
) -> None:
    chosen = with_file(spec(pp, ep, dp, n, STEPS, zero, of), offloading(name, pp, n, share))
    check(tmp_path, segments, {"mine": chosen}, pp * dp)


@pytest.mark.parametrize(("of", "pp", "ep", "dp", "zero", "n", "name", "share"), CASES)
def test_proven_peak_is_the_measured_one_and_lower(
    tmp_path: Path,
    segments: Segments,
    of: str,
    pp: int,
    ep: int,
    dp: int,
    zero: int,
    n: int,
    name: str,
    share: Fraction,
) -> None:
    """The peak of values on the device is the proven one, to the byte."""
    plain = spec(pp, ep, dp, n, zero=zero, of=of, schedule=name)
    chosen = with_file(plain, offloading(name, pp, n, share))
    peaks = measured_peaks(tmp_path, segments, chosen)
    without = lower_spec(plain)
    schedule = without.schedules[f"train_{n}"]
    assert sum(peaks) < dp * sum(m.activations + m.buffers for m in rank_memories(plain, without.lowering, schedule))
