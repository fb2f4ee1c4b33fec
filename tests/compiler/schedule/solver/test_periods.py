"""Periods of a steady state are legal, under the cap, and as long as stated; so are the runs made from them."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.schedule.costs import Costs, parse_costs, shipped_costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import simulate
from compiler.schedule.solver.cycle import (
    Period,
    fits,
    mark_periods,
    stretch_slots,
    unroll_period,
    waves,
)
from compiler.schedule.solver.problem import (
    ScheduleProblem,
    make_problem,
    resize_problem,
    schedule_of_slots,
)
from tests.compiler.schedule.solver.cases import costs

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")


def checked(problem: ScheduleProblem, slots: tuple[tuple[int, ...], ...], table: Costs) -> Fraction:
    """The makespan that the judge finds for slots that are legal and under the cap."""
    schedule: Schedule = schedule_of_slots(problem, slots)
    schedule.check()
    timeline = simulate(schedule, table)
    assert all(peak <= max(problem.caps) for peak in timeline.peak_activations)
    return timeline.makespan


def time_of(problem: ScheduleProblem, period: Period, table: Costs) -> Fraction:
    """The time that each further micro-batch of a chunk adds to a long run."""
    short, long = (resize_problem(problem, count) for count in (4 * problem.num_ranks, 4 * problem.num_ranks + 10))
    return (
        checked(long, unroll_period(long, period), table) - checked(short, unroll_period(short, period), table)
    ) / 10


def test_dualpipes_period_is_a_wave() -> None:
    problem = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 17, folded=True)
    period = next(waves(problem))
    assert time_of(problem, period, PAIRED) == 2 * PAIRED.pair_time("BF")


def test_a_micro_batch_takes_12_fifths_with_one_activation_less() -> None:
    problem = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 16, folded=True)
    assert time_of(problem, next(waves(problem)), PAIRED) == Fraction("4.8")  # one micro-batch per direction


def test_v3_is_under_the_best_known_without_a_search_of_fill_and_drain() -> None:
    table = shipped_costs("deepseek-v3-high")
    problem = make_problem(BIDIRECTIONAL, 16, 120, table, 16, folded=True)
    makespans = [checked(problem, unroll_period(problem, period), table) for period in islice(waves(problem), 2)]
    assert min(makespans) <= 25_918


@settings(max_examples=15)
@given(st.data())
def test_a_run_grows_by_exactly_its_period(data: st.DataObject) -> None:
    """It is legal and within the cap for any costs; latency applies to messages between ranks."""
    P = data.draw(st.sampled_from([2, 4, 6]))
    placement = data.draw(st.sampled_from([BIDIRECTIONAL, V, ONE_STAGE, loop(3)]))
    table = data.draw(costs(placement.num_stages(P)))
    table = Costs(**{**vars(table), "ranks": (), "latency": Fraction(0)})
    cap = data.draw(st.integers(placement.stages_per_rank, 2 * P + 3))
    folded = placement == BIDIRECTIONAL and data.draw(st.booleans())
    problem = make_problem(placement, P, 40, table, cap, folded)
    for period in islice(waves(problem), 3):
        assert fits(problem, period)
        short, middle, long = (resize_problem(problem, count) for count in (60, 90, 120))
        makespans = [checked(sized, unroll_period(sized, period), table) for sized in (short, middle, long)]
        assert makespans[2] - makespans[1] == makespans[1] - makespans[0]
        slots = mark_periods(short, period)
        assert slots and stretch_slots(short, slots, 120) == unroll_period(long, period)


def test_a_backward_in_front_of_its_forward_fits_nowhere() -> None:
    problem = make_problem(ONE_STAGE, 2, 8, Costs(), 2)
    assert not fits(problem, Period(((16, 0), (0, 16)), ((1, 1), (1, 1)), (0, 0)))


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_any_number_of_ranks_has_a_wave_under_the_cap_of_1f1b(num_ranks: int) -> None:
    problem = make_problem(BIDIRECTIONAL, num_ranks, 2 * num_ranks, PAIRED, num_ranks, folded=True)
    period = next(waves(problem))
    assert fits(problem, period) and time_of(problem, period, PAIRED) == Fraction("4.8")


@pytest.mark.parametrize(("num_ranks", "cap"), [(1, 6), (2, 11), (4, 22)])
def test_ranks_of_three_stages_have_a_wave_of_pairs_alone(num_ranks: int, cap: int) -> None:
    """Orders are drawn at random, as there are too many to try."""
    problem = make_problem(loop(3), num_ranks, 24, PAIRED, cap)
    period = next(waves(problem))
    assert fits(problem, period) and time_of(problem, period, PAIRED) == 3 * PAIRED.pair_time("BF")


def test_equal_arguments_give_equal_schedules_whatever_the_hash_seed() -> None:
    program = (
        "from compiler.schedule.solver import Solver; from compiler.schedule.costs import parse_costs;"
        "from compiler.ir.stage_placement import BIDIRECTIONAL, V, loop;"
        "print(Solver(parse_costs('FB=1.8'), 3, effort=0.02).solve(4, 40).schedule.to_text());"
        "solver = Solver(parse_costs('FB=1.8,FF=1.9'), 3, effort=0.02);"
        "[print(solver.solve(2, 7, placement=p).schedule.to_text()) for p in (V, loop(2), loop(3), BIDIRECTIONAL)]"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    text = texts.pop()
    assert not texts and "ranks=4 micro_batches=40" in text
    assert all(f"placement={placement}\n" in text for placement in ("v", "loop(2)", "loop(3)", "bidirectional"))
