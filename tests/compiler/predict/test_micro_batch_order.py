"""`schedule { order = cost }`: positions of micro-batches with unequal documents, and the saving."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import mean

import pytest

from compiler.emit.build_files import program_json
from compiler.pipeline import lower_spec
from compiler.predict.micro_batch_order import attention_share, weights_between
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.schedule.order import best_order
from compiler.schedule.simulate import simulate
from dsl.load import load
from runtime.contract.programs import RunProgram

QUICKSTART = Path(__file__).parents[3] / "specs" / "quickstart.dsc"


def weights(rng: random.Random, share: float, count: int) -> list[Fraction]:
    """Costs of micro-batches of one sequence cut into lognormal documents; attention is this share of the largest."""
    costs = []
    for _ in range(count):
        remaining, squares, sequence = 1000, 0, 1000
        while remaining:
            length = min(remaining, max(1, round(rng.lognormvariate(5.5, 1.2))))
            remaining, squares = remaining - length, squares + length**2
        costs.append(Fraction(round(1000 * (1 - share + share * squares / sequence**2)), 1000))
    return costs


def test_weights_are_evenly_spaced() -> None:
    assert weights_between(0.3, 4) == tuple(Fraction(tenths, 10) for tenths in (7, 8, 9, 10))
    assert weights_between(0.3, 2) == (Fraction(7, 10), 1) and weights_between(0.3, 1) == (Fraction(7, 10),)
    assert weights_between(0.0, 3) == (1, 1, 1)
    assert weights_between(1.0, 3) == (Fraction(1, 1000), Fraction(1, 2), 1), "none weighs nothing"


@pytest.mark.parametrize(("name", "least"), [("1f1b", 0.08), ("zbv", 0.01), ("dualpipe", 0.05)])
def test_the_positions_suit_lengths_that_are_not_known(name: str, least: float) -> None:
    """Positions found for evenly spaced costs save time on every draw of other costs, and this share on average."""
    schedule, share, rng = SCHEDULES[name].generate(4, 12), 0.5, random.Random(3)
    order = best_order(schedule, Costs(micro_batches=weights_between(share, 12)), 0.05)
    assert sorted(order) == [*range(12)]
    saved = []
    for _ in range(6):
        drawn = weights(rng, share, 12)
        ordered = [sorted(drawn)[rank] for rank in order]
        before, after = (simulate(schedule, Costs(micro_batches=tuple(costs))).makespan for costs in (drawn, ordered))
        saved.append(float(1 - after / before))
    assert mean(saved) > least and min(saved) > -0.01, saved


def test_weights_range_from_no_attention_to_full_attention() -> None:
    assert weights_between(0.25, 3) == (Fraction(3, 4), Fraction(7, 8), Fraction(1))
    assert weights_between(0.25, 1) == (Fraction(3, 4),)


@pytest.mark.parametrize("batches", ["= 32", "{ from = 16, to = 32, over = 100K tokens }"])
def test_programs_that_train_have_an_order(batches: str, tmp_path: Path) -> None:
    text = QUICKSTART.read_text("utf-8").replace("batch       = 16 ", f"batch {batches} ")
    (tmp_path / "run.dsc").write_text(text, "utf-8")
    spec = load(tmp_path / "run.dsc", overrides=["data.documents=masked", "schedule.order=cost"])
    lowered = lower_spec(spec)
    trained = {name: schedule for name, schedule in lowered.schedules.items() if name.startswith("train")}
    assert lowered.micro_batch_orders.keys() == trained.keys()
    for name, schedule in trained.items():
        assert sorted(lowered.micro_batch_orders[name]) == [*range(schedule.num_micro_batches)]
    assert 0 < attention_share(lowered.lowering) < 1


def test_programs_of_other_runs_are_as_they_were() -> None:
    spec = load(QUICKSTART, overrides=["data.documents=masked", "train.batch=32"])
    by_cost = spec.model_copy(update={"schedule": spec.schedule.model_copy(update={"order": "cost"})})
    plain, ordered = lower_spec(spec), lower_spec(by_cost)
    assert not plain.micro_batch_orders and plain.programs.keys() == ordered.programs.keys()
    for name, program in plain.programs.items():
        text = program_json(ordered.programs[name], ordered.micro_batch_orders.get(name, ()))
        assert '"order"' not in program_json(program)
        assert replace(RunProgram.from_json(text), order=()).to_json() == program_json(program)
        assert RunProgram.from_json(text).to_json() == text
        assert bool(RunProgram.from_json(text).order) == name.startswith("train")
