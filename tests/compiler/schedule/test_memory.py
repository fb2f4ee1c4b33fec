"""Memory of a rank: peaks against counts at every moment, bounds and searches against all orders of tiny pipelines."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from compiler.cli.main import main
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule import SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs, costs_of_json, parse_costs
from compiler.schedule.measure import measure
from compiler.schedule.memory import gigabytes, parse_bytes
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, peak_activations, simulate
from compiler.schedule.solver import Solver
from runtime.contract.actions import actions_of
from tests.compiler.cli.forms import parsed
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

HALF = Fraction(1, 2)
SHARES = (Fraction(0), Fraction(1, 3), HALF, Fraction(1))


def held_at(schedule: Schedule, timeline: Timeline, keeps: Fraction, rank: int, time: Fraction) -> Fraction:
    """The activations that a rank holds at a moment: from the start of the forward to the end of the backward or W."""
    begun: dict[tuple[int, int], Fraction] = {}
    for step, (start, end) in zip(schedule.actions[rank], timeline.spans[rank], strict=True):
        for action in actions_of(step):
            key = action.stage, action.micro_batch
            if action.kind == "F" and start <= time:
                begun[key] = Fraction(1)
            elif action.kind != "F" and end <= time:
                begun[key] = keeps if action.kind == "I" else Fraction(0)
    return sum(begun.values(), Fraction(0))


@pytest.mark.parametrize("name", ("1f1b", "zb1p", "zbv", "dualpipe", "vmin"))
def test_peaks_equal_the_maximum_over_all_moments(name: str) -> None:
    schedule = SCHEDULES[name].generate(4, 8)
    for keeps in SHARES:
        timeline = simulate(schedule, replace(Costs(), keeps=keeps))
        for rank, spans in enumerate(timeline.spans):
            peak = max(held_at(schedule, timeline, keeps, rank, start) for start, _ in spans)
            assert timeline.peak_activations[rank] == peak
    assert simulate(schedule, Costs()).peak_activations == peak_activations(schedule)


def test_a_deferred_weight_gradient_holds_its_share_of_the_activation() -> None:
    text = "# mine ranks=1 micro_batches=3 placement=loop(1)\nF0.0 I0.0 F0.1 I0.1 F0.2 B0.2 W0.0 W0.1\n"
    schedule = Schedule.from_text(text)
    schedule.check()
    peaks = [simulate(schedule, replace(Costs(), keeps=keeps)).peak_activations for keeps in SHARES]
    assert peaks == [(1,), (Fraction(5, 3),), (2,), (3,)]


def test_costs_read_the_share_kept_for_weight_gradients() -> None:
    assert parse_costs("F=2,keeps=0.5") == Costs(Fraction(2), keeps=HALF)
    assert costs_of_json('{"F": 1, "I": 1, "W": 1, "keeps": 0.25}').keeps == Fraction(1, 4)
    assert costs_of_json('{"F": 1, "I": 1, "W": 1}').keeps == 1
    for text in ("keeps=1.5", "keeps=0.0001", "keeps=1/1001"):
        with pytest.raises(ValueError, match="is not a share: write a number from 0 to 1 with up to 3 decimals"):
            parse_costs(text)


TINY: tuple[tuple[StagePlacement, int, int], ...] = (
    (BIDIRECTIONAL, 2, 2),
    (ONE_STAGE, 2, 2),
    (V, 1, 2),
    (loop(2), 1, 2),
    (ONE_STAGE, 1, 3),
)


@pytest.mark.parametrize("keeps", SHARES[:-1], ids=str)
def test_bounds_are_below_all_orders_and_searches_find_the_best(keeps: Fraction) -> None:
    rng, reached = random.Random(f"keeps {keeps}"), 0
    for placement, ranks, micro_batches in TINY:
        costs = replace(random_costs(rng, placement.num_stages(ranks), ranks), keeps=keeps)
        cap = rng.choice((Fraction(2), Fraction(5, 2), Fraction(3)))
        best = best_makespan(placement, ranks, micro_batches, costs, cap)
        assert best is not None
        bound = lower_bound(placement, ranks, micro_batches, costs, cap)
        assert bound <= best, (placement, costs, cap)
        reached += bound == best
        solution = Solver(costs, cap, effort=0.02).solve_on(placement, ranks, micro_batches)
        assert max(simulate(solution.schedule, costs).peak_activations) <= cap
        assert solution.makespan >= best >= solution.lower_bound
    assert reached


def test_named_schedules_are_not_below_the_bound_for_their_memory() -> None:
    for name, keeps in product(("zb1p", "zbv", "vmin", "vhalf", "dualpipe"), SHARES):
        schedule = SCHEDULES[name].generate(4, 8)
        measured = measure(schedule, replace(parse_costs("F=1,I=1,W=1,FB=1.8"), keeps=keeps))
        assert measured.lower_bound <= measured.makespan, (name, keeps)


def test_a_search_uses_the_room_that_an_input_gradient_frees() -> None:
    """With all kept until W, a cap of 1 leaves one order, of whole backwards; with nothing kept, W can wait."""
    solutions = [
        Solver(replace(Costs(), keeps=keeps), 1, effort=0.05).solve_on(ONE_STAGE, 2, 3)
        for keeps in (Fraction(1), Fraction(0))
    ]
    assert solutions[1].makespan < solutions[0].makespan
    assert [max(simulate(solution.schedule, solution.costs).peak_activations) for solution in solutions] == [1, 1]


# ---------------------------------------------------------------- bytes

TABLE = (
    '{"F": 1, "I": 1, "W": 1, "keeps": 0.5,'
    ' "bytes": {"activation": "2GB", "beside": ["34GB", "30GB", "30GB", 33000000000]}}'
)


def test_bytes_become_caps_by_rank() -> None:
    costs = costs_of_json(TABLE)
    assert costs.bytes.caps(Fraction(41 * 10**9), 4) == (Fraction(7, 2), Fraction(11, 2), Fraction(11, 2), 4)
    halves = costs.recut(4, 8)
    assert halves.bytes.activation == 10**9 and halves.bytes.beside == costs.bytes.beside
    one_for_all = costs_of_json('{"F": 1, "I": 1, "W": 1, "bytes": {"activation": "1GiB", "beside": 0}}')
    assert one_for_all.bytes.caps(Fraction(2**31), 3) == (2, 2, 2)
    with pytest.raises(ValueError, match="rank 0 holds 34GB besides activations, which take 2GB each: use 36GB"):
        costs.bytes.caps(Fraction(35 * 10**9), 4)
    assert min(costs.bytes.caps(Fraction(36 * 10**9), 4)) == 1
    with pytest.raises(ValueError, match="have weights of 4 ranks besides activations, but the schedule has 2"):
        costs.check(2, 2)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("80", "80GB"),
        ("80 GB", "80GB"),
        ("80Gb", "80GB"),
        ("41.5g", "41.5GB"),
        ("79 gib", "79GiB"),
        ("41B", "41GB"),
        ("41000000000", "41GB"),
        *((text, "80GB or 79.1GiB") for text in ("GB", "1e99GB", "80GB/s", "-1", "", "٤١")),
    ],
)
def test_invalid_amounts_of_memory_suggest_a_valid_one(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"is not an amount of memory: write it as {meant}$"):
        parse_bytes(text)
    assert parse_bytes(meant.partition(" ")[0])


def test_bytes_for_people_are_never_fewer_and_can_be_read() -> None:
    rng = random.Random(0)
    for _ in range(200):
        value = Fraction(rng.randrange(10 ** rng.randrange(1, 18)))
        assert value <= parse_bytes(gigabytes(value)) < value + 10**6


def test_schedules_stay_within_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    file.write_text(TABLE)
    command = ["schedule", "--ranks", "4", "--micro-batches", "6", "--costs", str(file), "--memory"]
    assert main([*command, "41GB", "--compare", "1f1b,auto", "--format", "json"]) == 0
    value = parsed(capsys.readouterr().out, "compared")
    named, searched = value["schedules"]
    assert named["fault"] == "1f1b holds 42GB on rank 0: use --memory 42GB or more, or auto"
    assert searched["peak_bytes"] <= 41 * 10**9 == value["memory"] and value["cap"] is None
    assert main([*command, "42GB", "--name", "1f1b", "--format", "json"]) == 0
    value = parsed(capsys.readouterr().out, "simulated")
    beside = costs_of_json(TABLE).bytes.beside
    assert value["peak_bytes"] == [amount + 2 * 10**9 * (4 - rank) for rank, amount in enumerate(beside)]
    assert replace(costs_of_json(json.dumps(value["costs"])), B=None) == costs_of_json(TABLE)
    assert main([*command, "42GB", "--name", "1f1b"]) == 0
    assert "memory 42GB on rank 0, the fullest, 34GB of it not activations\n" in capsys.readouterr().err
    assert main([*command, "42GB", "--name", "1f1b", "--cap", "9"]) == 2
    assert "both limit a rank: leave one of them out" in capsys.readouterr().err
