"""Micro-batches of unequal costs: the time of a step, the bound, and the order that the search finds."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.plan.plan import make_plan
from compiler.plan.spec_rates import rank_rates
from compiler.predict.micro_batch_order import costs_of_orders, micro_batch_orders
from compiler.program.lower import Lowering
from compiler.program.lower.estimate import copy_time
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs, costs_of_json, parse_costs
from compiler.schedule.measure import measure
from compiler.schedule.order import _TimedSteps, best_order, reorder_costs
from compiler.schedule.simulate import simulate
from dsl.load import load
from runtime.contract.actions import Action, Pair
from runtime.contract.names import ProgramName
from tests.compiler.schedule.offloading import offloading
from tests.compiler.schedule.test_simulate import plain, random_costs


def weights(count: int, sigma: float, seed: int) -> tuple[Fraction, ...]:
    """Lognormal costs."""
    rng = random.Random(seed)
    return tuple(Fraction(round(1000 * math.exp(rng.gauss(0, sigma))), 1000) for _ in range(count))


def test_a_weight_multiplies_every_action_of_a_micro_batch() -> None:
    costs = costs_of_json('{"F": 1, "I": 2, "W": 3, "pairs": {"FB": 3}, "stages": [1, 2], "micro_batches": [1, 0.5]}')
    assert [costs.step_time(Action(kind, 1, 1), 0) for kind in "FBIW"] == [1, 5, 2, 3]
    assert costs.step_time(Pair(Action("F", 0, 0), Action("B", 0, 1)), 0) == (1 + Fraction(5, 2)) / 2
    assert costs.step_time(Pair(Action("F", 1, 1), Action("B", 0, 0)), 0) == 3, "equal weights: the pair as it is"


def test_equal_weights_are_longer_actions() -> None:
    schedule = SCHEDULES["dualpipe"].generate(4, 8)
    costs = parse_costs("F=1,I=2,W=1,FB=3")
    tripled = simulate(schedule, replace(costs, micro_batches=(Fraction(3),) * 8))
    assert tripled.makespan == 3 * simulate(schedule, costs).makespan


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipe", "vhalf"])
def test_agrees_with_a_plain_simulator_and_the_bound_is_below(name: str) -> None:
    rng = random.Random(name)
    for ranks, micro_batches in ((2, 4), (4, 10)):
        schedule = SCHEDULES[name].generate(ranks, micro_batches)
        costs = random_costs(rng, schedule.num_stages, ranks)
        costs = replace(costs, micro_batches=weights(micro_batches, 0.6, ranks))
        timeline = simulate(schedule, costs)
        assert [list(rank) for rank in timeline.spans] == plain(schedule, costs)
        assert measure(schedule, costs).lower_bound <= timeline.makespan
        order = rng.sample(range(micro_batches), micro_batches)
        score = _TimedSteps(schedule, costs).scores([order])[0]
        exact = simulate(schedule, reorder_costs(costs, order))
        ends = [rank[-1][1] for rank in exact.spans]
        assert score == pytest.approx(float(exact.makespan + Fraction(1, 5) * sum(ends) / len(ends)))


@pytest.mark.parametrize("name", ["gpipe", "zb1p", "zbv", "dualpipe"])
def test_an_order_is_timed_with_its_copies(name: str) -> None:
    rng = random.Random(name)
    schedule = offloading(name, 4, 10, Fraction(4, 5))
    costs = random_costs(rng, schedule.num_stages, 4)
    costs = replace(costs, micro_batches=weights(10, 0.6, 4), O=Fraction(3), R=Fraction(5))
    order = rng.sample(range(10), 10)
    exact = simulate(schedule, reorder_costs(costs, order))
    ends = [rank[-1][1] for rank in exact.spans]
    score = _TimedSteps(schedule, costs).scores([order])[0]
    assert score == pytest.approx(float(exact.makespan + Fraction(1, 5) * sum(ends) / len(ends)))
    best = best_order(schedule, costs, effort=0.02)
    assert simulate(schedule, reorder_costs(costs, best)).makespan < simulate(schedule, costs).makespan


def test_a_run_of_a_file_with_copies_has_an_order() -> None:
    spec = load("specs/laptop-gqa.dsc", overrides=["schedule.order=cost", "data.documents=masked"])
    lowering = Lowering(make_plan(spec), rank_rates(spec))
    schedule = offloading("gpipe", 2, 8, Fraction(1, 2))
    orders = micro_batch_orders(spec, lowering, {ProgramName("train_8"): schedule})
    assert sorted(orders[ProgramName("train_8")]) == [*range(8)] != list(orders[ProgramName("train_8")])
    assert costs_of_orders(lowering).O is None and copy_time(lowering) == costs_of_orders(lowering, schedule).O


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_orders_of_few_micro_batches_are_optimal(name: str) -> None:
    schedule = SCHEDULES[name].generate(3, 5)
    costs = Costs(micro_batches=weights(5, 0.6, 7))
    best = min(simulate(schedule, reorder_costs(costs, order)).makespan for order in permutations(range(5)))
    order = best_order(schedule, costs)
    assert sorted(order) == [*range(5)]
    assert simulate(schedule, reorder_costs(costs, order)).makespan == best


@pytest.mark.parametrize(
    ("name", "sigma", "less"),
    [("1f1b", 0.3, 0.2), ("1f1b", 0.6, 0.25), ("dualpipe", 0.3, 0.17), ("dualpipe", 0.6, 0.24), ("zbv", 0.3, 0.06)],
)
def test_an_order_takes_less_than_a_random_one(name: str, sigma: float, less: float) -> None:
    schedule = SCHEDULES[name].generate(8, 24)
    costs = Costs(micro_batches=weights(24, sigma, 1))
    rng = random.Random(0)
    random_makespans = [simulate(schedule, reorder_costs(costs, rng.sample(range(24), 24))).makespan for _ in range(10)]
    makespan = simulate(schedule, reorder_costs(costs, best_order(schedule, costs, 0.3))).makespan
    assert makespan <= (1 - less) * sum(random_makespans) / len(random_makespans)


def test_the_order_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from compiler.schedule import SCHEDULES; from compiler.schedule.order import best_order;"
        "from compiler.schedule.costs import Costs; from fractions import Fraction;"
        "costs = Costs(micro_batches=tuple(Fraction(k * k % 7 + 1) for k in range(9)));"
        "print(best_order(SCHEDULES['zbv'].generate(3, 9), costs, 0.1))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout and runs[0].stdout.startswith(b"[")


# ---------------------------------------------------------------- the command


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "batch.json"
    path.write_text('{"F": 1, "I": 1, "W": 1, "micro_batches": [3, 1, 2, 1, 1, 2]}')
    return str(path)


def test_the_order_is_printed_with_both_makespans(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "--name", "1f1b", "--ranks", "3", "--micro-batches", "6", "--costs", table]
    assert main(command) == 0
    assert "in the order of the data: --order searches" in capsys.readouterr().err
    assert main([*command, "--order"]) == 0
    assert "\nthe order of the data takes 55; this one takes " in capsys.readouterr().err
    assert main([*command, "--order", "--format", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert sorted(value["order"]) == [*range(6)]
    for order, key in ((value["order"], "makespan"), (range(6), "unordered")):
        costs = Costs(micro_batches=tuple(Fraction([3, 1, 2, 1, 1, 2][m]) for m in order))
        assert max(rank[-1][1] for rank in plain(SCHEDULES["1f1b"].generate(3, 6), costs)) == value[key]


def test_auto_is_never_slower_than_named_schedules(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = "1f1b,zb1p,zbv,vhalf,auto"
    command = [
        "schedule",
        "--compare",
        names,
        "--ranks",
        "3",
        "--micro-batches",
        "6",
        "--costs",
        table,
        "--format",
        "json",
    ]
    assert main(command) == 0
    *named, auto = json.loads(capsys.readouterr().out)["schedules"]
    assert auto["makespan"] <= min(row["makespan"] for row in named)


@pytest.mark.parametrize("seed", range(2))
def test_auto_in_its_best_order_is_never_slower_than_named_schedules_in_theirs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random costs; if a placement is asked for, `auto` keeps to it."""
    monkeypatch.setattr("compiler.schedule.order._ROUNDS", (4, 12))
    rng = random.Random(seed)
    drawn = {"FB": rng.choice([1.6, 2])}
    table = {"F": 1, "I": rng.choice([0.5, 1, 2]), "W": 1, "pairs": drawn, "latency": rng.choice([0, 0.25])}
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(table | {"micro_batches": [float(weight) for weight in weights(4, 0.6, seed)]}))
    command = ["schedule", "--ranks", "2", "--micro-batches", "4", "--costs", str(path), "--order", "--format", "json"]
    assert main([*command, "--compare", ",".join((*SCHEDULES, "auto"))]) == 0
    *named, auto = json.loads(capsys.readouterr().out)["schedules"]
    assert auto["makespan"] <= min(row["makespan"] for row in named if row["fault"] is None)
    assert main([*command, "--name", "auto", "--placement", "v"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"] == "v"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--micro-batches", "5"], "the costs have weights of 6 micro-batches, but the schedule has 5"),
        (["--micro-batches", "6", "--costs", "F=1", "--order"], "--order needs micro-batches of unequal costs"),
        (
            ["--micro-batches", "6", "--name", "auto", "--cap", "9", "--micro-batches", "7"],
            "weights of 6 micro-batches",
        ),
    ],
)
def test_mistakes_are_reported(table: str, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--name", "1f1b", "--ranks", "3", "--costs", table, *flags]) == 2
    assert said in capsys.readouterr().err
