"""`schedule { name = auto }`: searched for at the predicted costs, under the spec's cap, for every size of a ramp."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compiler.lower.estimate import stage_costs
from compiler.lower.rates import rates_of
from compiler.pipeline import lower_spec
from compiler.schedules import SCHEDULES
from compiler.schedules.simulate import peak_activations, simulate
from dsl.load import load

QUICKSTART = Path(__file__).parents[2] / "specs" / "quickstart.dsc"


@pytest.mark.parametrize(("cap", "most"), [((), 3), (("schedule.cap=2",), 2)])
def test_auto_is_proven_and_no_longer_than_dualpipe(cap: tuple[str, ...], most: int) -> None:
    said: list[str] = []
    lowered = lower_spec(load(QUICKSTART, overrides=["schedule.name=auto", *cap]), progress=said.append)
    (name,) = [name for name in lowered.schedules if name.startswith("train")]
    schedule = lowered.schedules[name]
    assert name in lowered.certificates
    assert schedule.name == "auto"
    assert max(peak_activations(schedule)) <= most
    assert said[-1] == f"search for a schedule of {schedule.num_micro_batches} micro-batches: 100%"
    if most == 3:
        published = SCHEDULES["dualpipe"].generate(schedule.num_ranks, schedule.num_micro_batches)
        costs = stage_costs(lowered.plan, lowered.cuts, rates_of(load(QUICKSTART)))
        assert simulate(schedule, costs).makespan < simulate(published, costs).makespan


def test_each_size_of_a_ramp_has_its_own_schedule(tmp_path: Path) -> None:
    text = QUICKSTART.read_text("utf-8").replace("name = dualpipe", "name = auto")
    grown = text.replace("batch       = 16 ", "batch { from = 24, to = 40, over = 100K tokens } ")
    assert grown != text
    (tmp_path / "ramp.dsc").write_text(grown, "utf-8")
    shutil.copytree(QUICKSTART.parent / "clusters", tmp_path / "clusters")
    shutil.copytree(QUICKSTART.parent / "precision", tmp_path / "precision")
    lowered = lower_spec(load(tmp_path / "ramp.dsc"))
    trained = [schedule for name, schedule in lowered.schedules.items() if name.startswith("train")]
    assert [schedule.num_micro_batches for schedule in trained] == [6, 8, 10]
    assert {schedule.name for schedule in trained} == {"auto"}
