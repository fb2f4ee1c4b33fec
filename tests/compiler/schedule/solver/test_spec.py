"""`schedule { name = auto }`: searched for at the predicted costs, under the spec's cap, for every size of a ramp."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.pipeline import lower_spec
from compiler.plan.spec_rates import rates_of
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import stage_costs
from compiler.schedule import SCHEDULES
from compiler.schedule.simulate import peak_activations, simulate
from dsl.load import load
from dsl.messages.diagnostics import SpecError

QUICKSTART = Path(__file__).parents[4] / "specs" / "quickstart.dsc"


@pytest.mark.parametrize(("cap", "most"), [((), 3), (("schedule.cap=2",), 2)])
def test_auto_is_proven_and_no_longer_than_dualpipe(cap: tuple[str, ...], most: int) -> None:
    progress_lines: list[str] = []
    lowered = lower_spec(load(QUICKSTART, overrides=["schedule.name=auto", *cap]), progress=progress_lines.append)
    (name,) = [name for name in lowered.schedules if name.startswith("train")]
    schedule = lowered.schedules[name]
    assert name in lowered.certificates
    assert schedule.name == "auto"
    assert max(peak_activations(schedule)) <= most
    assert progress_lines[-1] == f"search for a schedule of {schedule.num_micro_batches} micro-batches: 100%"
    if most == 3:
        published = SCHEDULES["dualpipe"].generate(schedule.num_ranks, schedule.num_micro_batches)
        costs = stage_costs(Lowering(lowered.plan, rates_of(load(QUICKSTART))))
        assert simulate(schedule, costs).makespan < simulate(published, costs).makespan


def test_ranks_have_caps_of_their_own() -> None:
    """A schedule that two caps allow is legal under them, and shorter than under the smaller one for both ranks."""
    makespans = {}
    for caps in ("[2,1]", "[1,2]", "1", "2"):
        spec = load(QUICKSTART, overrides=["schedule.name=auto", "schedule.placement=loop", f"schedule.cap={caps}"])
        lowered = lower_spec(spec)
        schedule = lowered.main_schedule
        limits = spec.schedule.cap if isinstance(spec.schedule.cap, tuple) else (spec.schedule.cap,) * 2
        peaks = peak_activations(schedule)
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        assert lowered.certificates.keys() == lowered.schedules.keys()
        makespans[caps] = simulate(schedule, stage_costs(Lowering(lowered.plan, rates_of(spec)))).makespan
    assert makespans["2"] < makespans["[2,1]"] < makespans["[1,2]"] == makespans["1"]


def test_each_size_of_a_ramp_has_its_own_schedule(tmp_path: Path) -> None:
    text = QUICKSTART.read_text("utf-8").replace("name = dualpipe", "name = auto")
    grown = text.replace("batch       = 16 ", "batch { from = 24, to = 40, over = 100K tokens } ")
    assert grown != text
    (tmp_path / "ramp.dsc").write_text(grown, "utf-8")
    lowered = lower_spec(load(tmp_path / "ramp.dsc"))
    trained = [schedule for name, schedule in lowered.schedules.items() if name.startswith("train")]
    assert [schedule.num_micro_batches for schedule in trained] == [6, 8, 10]
    assert {schedule.name for schedule in trained} == {"auto"}


@pytest.mark.parametrize(
    ("ranks", "keys", "placement"),
    [
        (2, ("copies=1",), "v"),
        (2, ("copies=2",), "bidirectional"),
        (2, ("placement=bidirectional",), "bidirectional"),
        (2, ("placement=v",), "v"),
        (2, ("placement=loop",), "loop(1)"),
        (2, ("placement=loop", "chunks=3"), "loop(3)"),
        (3, ("placement=loop",), "loop(1)"),
        (3, ("placement=loop", "chunks=2", "copies=1"), "loop(2)"),
        (1, ("placement=loop", "chunks=2"), "loop(2)"),
    ],
)
def test_a_run_says_where_its_stages_are(ranks: int, keys: tuple[str, ...], placement: str) -> None:
    sizes = (f"cluster.node.devices={ranks}", f"parallel.pipeline={ranks}", "parallel.expert=1", "train.batch=8")
    spec = load(QUICKSTART, overrides=[*sizes, "schedule.name=auto", *(f"schedule.{key}" for key in keys)])
    lowered = lower_spec(spec)
    assert str(lowered.plan.stage_placement) == placement
    assert {str(schedule.stage_placement) for schedule in lowered.schedules.values()} == {placement}
    assert {schedule.name for name, schedule in lowered.schedules.items() if name.startswith("train")} == {"auto"}
    assert lowered.certificates.keys() == lowered.schedules.keys()


THREE = ("cluster.node.devices=3", "parallel.pipeline=3", "parallel.expert=1", "schedule.name=auto")


@pytest.mark.parametrize(
    ("last", "layout", "placement"),
    [
        (3, None, "v"),  # the last layer: there are four, and six stages
        (2, None, "loop(1)"),
        (3, "Et|t|t|tmL", None),
        (3, "Et|tt|tmL", "loop(1)"),
        (3, "E|t|t|t|t|mL", "v"),
    ],
)
def test_an_odd_number_of_ranks_folds_where_there_are_layers(
    last: int, layout: str | None, placement: str | None, tmp_path: Path
) -> None:
    """It also folds with an explicit layout; the cap counts activations of 1/P of the model."""
    written = [f'parallel.layout="{layout}"'] if layout else []
    overrides = [*THREE, "schedule.cap=2", "train.batch=6", *written]
    path = tmp_path / "three.dsc"
    path.write_text(QUICKSTART.read_text("utf-8").replace("layers 1..3", f"layers 1..{last}"), "utf-8")
    if placement is None:
        with pytest.raises(SpecError, match="the layout has 4 stages, 3 pipeline ranks of 2 stages have 6"):
            load(path, overrides=overrides)
        return
    lowered = lower_spec(load(path, overrides=overrides))
    parts = len(lowered.plan.stages) // 3
    assert str(lowered.plan.stage_placement) == placement and parts == (2 if placement == "v" else 1)
    assert {str(schedule.stage_placement) for schedule in lowered.schedules.values()} == {placement}
    assert max(peak_activations(lowered.main_schedule)) <= 2 * parts
    assert lowered.certificates.keys() == lowered.schedules.keys()
