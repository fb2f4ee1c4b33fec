"""The page of the toolchain: in which order a spec walks through the rooms of the compiler, and what comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.segment_cache import Segments
from compiler.pipeline import lower_spec
from dsl.load import load
from runtime.contract.names import ProgramName
from tests.measure.walk import climbs, steps
from tests.test_structure import ROOMS

TINY = Path(__file__).parents[2] / "specs" / "tiny.dsc"
MOST_CLIMBS = 3


def test_compilation_returns_to_an_earlier_folder_at_most_three_times(segments: Segments) -> None:
    modules = steps(load(str(TINY)), segments)
    assert {"compiler.plan.plan", "compiler.program.lower.lowering", "compiler.emit.emission"} <= {*modules}
    assert len(climbs(modules, ROOMS["compiler"])) <= MOST_CLIMBS


@pytest.mark.parametrize(("steps", "sizes"), [(1, (4,)), (2, (4, 6)), (3, (4, 6, 8)), (9, (4, 6, 8))])
def test_a_batch_that_grows_has_a_program_of_each_size_that_is_trained(steps: int, sizes: tuple[int, ...]) -> None:
    """A size that would begin where the run ends has neither a place in the plan nor a program."""
    ramp = ("from=4", "to=8", "over=128 tokens")
    overrides = [
        f"train.steps={steps}",
        "train.validate.every=1 steps",
        *(f"train.batch.{setting}" for setting in ramp),
    ]
    lowered = lower_spec(load(str(TINY), overrides=overrides))
    assert lowered.num_steps == steps
    assert lowered.batches == tuple(enumerate(sizes))
    programs = {*(f"train_{size}" for size in sizes), f"evaluate_{sizes[-1]}"}
    assert lowered.schedules.keys() == lowered.programs.keys() == programs
    turned = replace(lowered, schedules=dict([*lowered.schedules.items()][::-1]))
    for variant in (lowered, turned):
        assert variant.main_schedule is lowered.schedules[ProgramName.of("train", sizes[-1])]
