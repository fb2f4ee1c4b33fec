"""Copies of activations to the host: their times and memory against an independent judge, bounds, messages, forms."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from benchmarks.offload import CAPS, TIMES, row
from compiler.cli.commands.schedule_answer import number_text
from compiler.cli.main import main
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V
from compiler.schedule import SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs, costs_of_json, parse_costs
from compiler.schedule.schedule import Schedule, ScheduleError
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solution, Solver, solve_with_copies
from compiler.schedule.spec_schedule import read_schedule
from compiler.schedule.torch_csv import from_torch_csv, to_torch_csv
from compiler.tools.picture.drawing import DrawnCopy
from compiler.tools.picture.panel import panel_of
from runtime.contract.actions import KINDS, Action, Step, actions_of
from tests.compiler.cli.forms import parsed
from tests.compiler.schedule.independent import judge

HALF = Fraction(1, 2)
QUICKSTART = Path(__file__).parents[3] / "specs" / "quickstart.dsc"
MINE = """# mine ranks=2 micro_batches=3 placement=loop(1)
F0.0 F0.1 O0.1 F0.2 B0.0 R0.1 B0.1 B0.2
F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
"""


def with_random_copies(schedule: Schedule, rng: random.Random, share: float) -> Schedule:
    """The schedule with copies of some activations, anywhere between their forwards and their backwards."""
    rows = []
    for steps in schedule.actions:
        row: list[Step] = list(steps)
        for action in [a for step in steps for a in actions_of(step) if a.kind == "F" and rng.random() < share]:
            key = action.stage, action.micro_batch
            for kind in "OR":
                places = [
                    k for k, step in enumerate(row) if any((a.stage, a.micro_batch) == key for a in actions_of(step))
                ]
                back = next(k for k in places if any(a.kind in "BI" for a in actions_of(row[k]) if a.stage == key[0]))
                first = max(k for k in places if k < back)
                row.insert(rng.randint(first + 1, back), Action(kind, *key))  # type: ignore[arg-type]
        rows.append(tuple(row))
    return replace(schedule, actions=tuple(rows))


def random_times(rng: random.Random) -> Costs:
    F, I, W, O, R = (Fraction(rng.randint(1, 9), rng.choice((1, 2))) for _ in range(5))
    return Costs(F, I, W, O=O, R=R if rng.random() < 0.5 else O, latency=Fraction(rng.randint(0, 2)))


@pytest.mark.parametrize("name", ("1f1b", "zb1p", "zbv", "dualpipe", "interleaved"))
def test_the_simulator_is_the_judge(name: str) -> None:
    rng = random.Random(name)
    for _ in range(6):
        schedule = with_random_copies(SCHEDULES[name].generate(4, 8), rng, rng.random())
        schedule.check()
        assert Schedule.from_text(schedule.to_text()) == schedule == Schedule.from_json(schedule.to_json())
        costs = random_times(rng)
        timeline = simulate(schedule, costs)
        judged = judge(schedule.to_text(), {kind: costs.lone_time(kind) for kind in "FIWBOR"}, costs.latency)
        assert (timeline.makespan, timeline.peak_activations) == (judged.makespan, judged.peaks)
        sizes = schedule.stage_placement, 4, 8
        assert lower_bound(*sizes, costs, timeline.peak_activations) <= timeline.makespan
        rows = panel_of(schedule, costs).rows
        assert all(row.peak <= peak for row, peak in zip(rows, timeline.peak_activations, strict=True))


def test_a_rank_waits_for_an_o_and_a_backward_for_its_r() -> None:
    timeline = simulate(Schedule.from_text(MINE), Costs(O=Fraction(2), R=Fraction(3, 2)))
    assert timeline.makespan == Fraction(25, 2)
    copies = [(k, start * timeline.unit, end * timeline.unit) for k, start, end in timeline.copies[0]]
    assert copies == [(2, 2, 4), (5, 7, Fraction(17, 2))]
    assert (timeline.peak_activations, timeline.copies[1]) == ((2, 1), ())


def orders(num_micro_batches: int, whole: bool) -> Iterator[tuple[str, ...]]:
    """All rows that a rank with one stage can run, with forwards in the order of the micro-batches."""
    ways = ("FB", "FORB") if whole else ("FB", "FIW", "FORB", "FORIW")
    for kinds in product(ways, repeat=num_micro_batches):
        yield from merged(kinds, (0,) * num_micro_batches)


def merged(kinds: tuple[str, ...], done: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    if all(k == len(sequence) for k, sequence in zip(done, kinds, strict=True)):
        yield ()
    for m, sequence in enumerate(kinds):
        if done[m] < len(sequence) and (done[m] or m == 0 or done[m - 1]):
            for following in merged(kinds, (*done[:m], done[m] + 1, *done[m + 1 :])):
                yield (f"{sequence[done[m]]}.{m}", *following)


def best_under(cap: int, costs: Costs, num_ranks: int, num_micro_batches: int, whole: bool) -> Fraction:
    """The least makespan of all orders of a small pipeline, by the judge, within the cap."""
    times = {kind: costs.lone_time(kind) for kind in "FIWBOR"}
    rows = [orders(num_micro_batches, whole) for _ in range(num_ranks)]
    fitting = [[row for row in rank_rows if _held(row) <= cap] for rank_rows in rows]
    head, least = f"# x ranks={num_ranks} micro_batches={num_micro_batches} placement=loop(1)", None
    for chosen in product(*fitting):
        lines = (" ".join(a.replace(".", f"{rank}.") for a in row) for rank, row in enumerate(chosen))
        try:
            makespan = judge("\n".join((head, *lines)), times).makespan
        except AssertionError:  # ranks wait for each other
            continue
        least = makespan if least is None else min(least, makespan)
    assert least is not None
    return least


def _held(row: tuple[str, ...]) -> int:
    activations = peak = 0
    for action in row:
        activations += action[0] in "FR"
        peak = max(peak, activations)
        activations -= action[0] in "BWO"
    return peak


@pytest.mark.parametrize(("sizes", "cap", "whole"), [((1, 2), 1, False), ((1, 3), 2, True), ((2, 2), 1, True)], ids=str)
def test_bounds_and_searches_hold_against_all_orders(sizes: tuple[int, int], cap: int, whole: bool) -> None:
    rng = random.Random(f"{sizes} {cap}")
    for _ in range(2):
        costs = replace(random_times(rng), latency=Fraction(0))
        least = best_under(cap, costs, *sizes, whole)
        assert lower_bound(ONE_STAGE, *sizes, costs, cap) <= least
        solution = auto(costs, cap, *sizes)
        assert solution.lower_bound <= solution.makespan <= auto(costs.without_offload(), cap, *sizes).makespan
        assert whole or solution.makespan >= least


def auto(costs: Costs, cap: int, num_ranks: int, num_micro_batches: int) -> Solution:
    solver = Solver(costs, Fraction(cap), effort=0.02)

    def search(each: Solver) -> Solution:
        return each.solve(num_ranks, num_micro_batches, placement=ONE_STAGE)

    return solve_with_copies(solver, num_ranks, num_ranks, search) if costs.can_offload else search(solver)


@pytest.mark.parametrize(("placement", "keeps"), [(ONE_STAGE, 1), (V, HALF), (BIDIRECTIONAL, 1)], ids=str)
def test_auto_copies_where_that_is_shorter(placement: StagePlacement, keeps: Fraction) -> None:
    (P, cap), rng = ((4, 3) if placement == BIDIRECTIONAL else (3, 2)), random.Random(f"auto {placement}")
    costs = replace(random_times(rng), keeps=Fraction(keeps))
    costs = replace(costs, O=costs.F / 2, R=costs.F)
    solver = Solver(costs, Fraction(cap), effort=0.02)

    def search(each: Solver) -> Solution:
        return each.solve(P, 7, placement=placement)

    solution = solve_with_copies(solver, P, P, search)
    solution.schedule.check()
    without = search(replace(solver, costs=costs.without_offload()))
    timeline = simulate(solution.schedule, solution.costs)
    assert max(timeline.peak_activations) <= cap * solution.schedule.stage_placement.stages_per_rank
    assert solution.lower_bound <= timeline.makespan == solution.makespan < without.makespan
    assert solve_with_copies(solver, P, P, search) == solution


def test_the_page_has_a_row_for_each_cap_and_time() -> None:
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    rows = page.partition("<!-- offload")[2].partition("<!-- end")[0].strip().split("\n")[4:]
    assert [row.split("|")[1:3] for row in rows] == [
        [f" {cap} ", f" {number_text(time)} F "] for cap in CAPS for time in TIMES
    ]


def test_a_row_of_the_page_is_current() -> None:
    page = (Path(__file__).parents[3] / "docs" / "schedules.md").read_text()
    assert row(4, Fraction(1), Fraction(83)) in page, "python -m benchmarks.offload"


def test_costs_read_the_time_of_copies() -> None:
    assert parse_costs("F=2,O=3") == Costs(Fraction(2), O=Fraction(3), R=Fraction(3))
    parsed = costs_of_json('{"F": 1, "I": 1, "W": 1, "O": null, "R": 0.5}')
    assert (Fraction(1, 2), Fraction(1, 2), Fraction(1, 4)) == (parsed.O, parsed.R, parsed.recut(4, 8).O)
    assert not Costs().can_offload
    assert Costs(O=Fraction(3), R=Fraction(3), stages=(Fraction(2),)).step_time(Action("O", 0, 0), 0) == 3


WRONG = {
    "O0.0 F0.0 R0.0 B0.0": "rank 0, O0.0: comes before its F",
    "F0.0 R0.0 B0.0": "rank 0, R0.0: comes before its O",
    "F0.0 O0.0 B0.0": "rank 0, B0.0: the values that its F saved are on the host: put R0.0 before it",
    "F0.0 O0.0 O0.0 R0.0 B0.0": "rank 0, O0.0: runs after F, O of the same stage and micro-batch, so twice",
    "F0.0 B0.0 O0.0 R0.0": "rank 0, O0.0: cannot follow F, B",
    "F0.0 I0.0 O0.0 R0.0 W0.0": "rank 0, O0.0: cannot follow F, I",
    "F0.0 O0.0": "rank 0, R0.0: missing",
    "F0.0 O0.0 R0.0": "rank 0, B0.0: missing",
    "(F0.0|O0.0) R0.0 B0.0": "rank 0, (F0.0|O0.0): O and R run beside compute, so write each by itself",
}


@pytest.mark.parametrize("row", WRONG)
def test_wrong_lists_are_named(row: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text(f"# mine ranks=1 micro_batches=1 placement=loop(1)\n{row}\n").check()
    assert str(caught.value) == WRONG[row]


def test_a_spec_takes_copies_and_torch_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, spec = tmp_path / "mine.schedule", tmp_path / "train.dsc"
    path.write_text(MINE.replace("micro_batches=3", "micro_batches=2").replace(" F0.2", "").replace(" B0.2", ""))
    path.write_text(path.read_text().replace(" F1.2 B1.2", ""))
    assert read_schedule(path).num_micro_batches == 2
    spec.write_text(QUICKSTART.read_text().replace("{ name = dualpipe }", f'{{ file = "{path}" }}'))
    assert main(["check", str(spec)]) != 0
    assert "is for 2 micro-batches" in capsys.readouterr().err, "its O and R are no fault"
    with pytest.raises(ValueError, match="torch has no O and R: write --format text or json"):
        to_torch_csv(read_schedule(path))
    with pytest.raises(ScheduleError, match="'0O1' is not an action of torch"):
        from_torch_csv("0F0,0O1\n")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(MINE)
    assert main(["schedule", str(path), "--offload", "2", "--cap", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == MINE
    assert "makespan 13 ·" in err and "1 of 6 activations go to the host and come back" in err
    assert main(["schedule", str(path), "--costs", "F=1"]) == 2
    assert "the schedule has O, but the costs have no time for it: use --offload TIME" in capsys.readouterr().err
    assert main(["schedule", str(path), "--offload", "2", "--format", "json"]) == 0
    value = parsed(capsys.readouterr().out, "simulated")
    assert costs_of_json(json.dumps(value["costs"])) == Costs(O=Fraction(2), R=Fraction(2), B=Fraction(2))
    assert main(["schedule", str(path), "--offload", "x"]) == 2
    assert "--offload 'x' is not a number" in capsys.readouterr().err


def test_pictures_have_copies_below_the_steps() -> None:
    panel = panel_of(Schedule.from_text(MINE), Costs(O=Fraction(2), R=Fraction(2)))
    assert panel.rows[0].copies == (DrawnCopy("O0.1", 2.0, 4.0, 2, 4.0), DrawnCopy("R0.1", 7.0, 9.0, 4, 7.0))
    assert [cell.label for cell in panel.rows[0].cells] == ["F0.0", "F0.1", "F0.2", "B0.0", "B0.1", "B0.2"]
    assert {drawn.kind for cell in panel.cells for drawn in cell.actions} <= {*KINDS}
