"""Periods of a steady state: legal, under the cap, and as long as they say; with the runs that are made of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.schedules.costs import Costs, parse_costs, shipped
from compiler.schedules.schedule import Schedule
from compiler.schedules.simulate import simulate
from compiler.solver.cycle import Period, cycle_time, fits, marked, unrolled
from compiler.solver.periods import stretched
from compiler.solver.problem import Problem, make_problem, resized, schedule_of_slots
from compiler.solver.waves import waves
from compiler.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from tests.solver.cases import costs

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
SIXTEEN = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 16, folded=True)


def checked(problem: Problem, slots: tuple[tuple[int, ...], ...], table: Costs) -> Fraction:
    """The makespan that the judge finds for slots that are legal and under the cap."""
    schedule: Schedule = schedule_of_slots(problem, slots)
    schedule.check()
    timeline = simulate(schedule, table)
    assert all(peak <= max(problem.caps) for peak in timeline.peak_activations)
    return timeline.makespan


def test_dualpipes_period_is_a_wave() -> None:
    problem = make_problem(BIDIRECTIONAL, 16, 64, PAIRED, 17, folded=True)
    period = next(waves(problem))
    assert cycle_time(problem, period) == 2 * PAIRED.two("BF") / problem.unit


def test_with_one_activation_less_a_micro_batch_takes_two_and_two_fifths() -> None:
    period = next(waves(SIXTEEN))
    assert cycle_time(SIXTEEN, period) == Fraction("4.8") / SIXTEEN.unit  # one of each direction
    runs = [checked(each, unrolled(each, period), PAIRED) for each in (SIXTEEN, resized(SIXTEEN, 42))]
    assert runs[1] - runs[0] == 10 * Fraction("4.8")


def test_v3_is_under_the_best_known_without_a_search_of_fill_and_drain() -> None:
    table = shipped("deepseek-v3-high")
    problem = make_problem(BIDIRECTIONAL, 16, 120, table, 16, folded=True)
    found = [checked(problem, unrolled(problem, period), table) for period in islice(waves(problem), 2)]
    assert min(found) <= 25_918


@settings(max_examples=15)
@given(st.data())
def test_a_run_grows_by_exactly_its_period(data: st.DataObject) -> None:
    """It is legal and holds no more than the cap, whatever the costs; latency is that of messages between ranks."""
    P = data.draw(st.sampled_from([2, 4, 6]))
    placement = data.draw(st.sampled_from([BIDIRECTIONAL, V, ONE_STAGE, loop(3)]))
    table = data.draw(costs(placement.num_stages(P)))
    table = Costs(**{**vars(table), "ranks": (), "latency": Fraction(0)})
    cap = data.draw(st.integers(placement.stages_per_rank, 2 * P + 3))
    folded = placement == BIDIRECTIONAL and data.draw(st.booleans())
    problem = make_problem(placement, P, 40, table, cap, folded)
    for period in islice(waves(problem), 3):
        assert fits(problem, period)
        time = cycle_time(problem, period)
        assert time is not None
        short, long = (resized(problem, count) for count in (60, 120))
        took = [checked(each, unrolled(each, period), table) / problem.unit for each in (short, long)]
        assert took[1] - took[0] == 60 * time
        slots = marked(short, period)
        assert slots and stretched(short, slots, 120) == unrolled(long, period)


def test_rows_that_wait_for_each_other_have_no_period() -> None:
    problem = make_problem(ONE_STAGE, 2, 8, Costs(), 2)
    backward_first = Period(1, ((16, 0), (0, 16)), ((1, 1), (1, 1)), (0, 0))
    assert not fits(problem, backward_first)
    late = Period(1, ((0, 16), (0, 16)), ((0, 0), (1, 0)), (0, 0))  # the second row is ahead of the first
    assert cycle_time(problem, late) is None


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_any_number_of_ranks_has_a_wave_under_the_cap_of_1f1b(num_ranks: int) -> None:
    problem = make_problem(BIDIRECTIONAL, num_ranks, 2 * num_ranks, PAIRED, num_ranks, folded=True)
    period = next(waves(problem))
    assert fits(problem, period) and cycle_time(problem, period) == Fraction("4.8") / problem.unit
