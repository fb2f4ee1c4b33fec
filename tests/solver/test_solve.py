"""`auto` is legal, under the cap, never longer than a named schedule, and as short as it can be where that is known."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.schedules.bound import lower_bound
from compiler.schedules.costs import Costs, any_pairs, parse_costs
from compiler.schedules.placement import BIDIRECTIONAL
from compiler.schedules.simulate import simulate
from compiler.solver import Cores, Solution, default_cap, solve
from tests.solver.cases import costs, named

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
QUICK = 0.02  # effort


def checked(solution: Solution, table: Costs, cap: int | None) -> Solution:
    """A solution that is what it says it is."""
    schedule = solution.schedule
    schedule.check()
    timeline = simulate(schedule, table)
    assert timeline.makespan == solution.makespan >= solution.lower_bound
    assert cap is None or max(timeline.peak_activations) <= cap
    assert schedule.name == "auto"
    return solution


@settings(max_examples=60)
@given(st.data())
def test_never_worse_than_a_named_schedule(data: st.DataObject) -> None:
    num_ranks, num_micro_batches = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 14))
    table = data.draw(costs(num_ranks))
    cap = data.draw(st.none() | st.integers(1, 8))
    found = checked(solve(num_ranks, num_micro_batches, table, cap, effort=QUICK), table, cap)
    assert found.schedule.num_ranks == num_ranks
    assert found.schedule.num_micro_batches == num_micro_batches
    assert found.schedule.placement in ("loop(1)", BIDIRECTIONAL if num_ranks % 2 == 0 else "loop(1)")
    for schedule in named(num_ranks, num_micro_batches, cap):
        assert found.makespan <= simulate(schedule, table).makespan, schedule.name


def test_the_least_of_no_gain_at_the_cap_of_1f1b() -> None:
    found = checked(solve(8, 20, Costs(), 8), Costs(), 8)
    assert found.makespan == found.lower_bound == 63


def test_dualpipe_is_beaten_where_pairs_gain() -> None:
    """The figures of a tenth of the search; `benchmarks.solver` has those of all of it."""
    assert checked(solve(8, 20, PAIRED, 9, effort=0.2), PAIRED, 9).makespan <= Fraction("49.8")  # DualPipe: 50.4
    table = any_pairs(PAIRED)
    assert checked(solve(8, 20, table, 9, effort=0.2), table, 9).makespan <= Fraction("48.8")
    assert checked(solve(4, 8, PAIRED, 5), PAIRED, 5).makespan == Fraction("20.4")


def test_fewer_micro_batches_than_dualpipe_has() -> None:
    found = checked(solve(8, 10, PAIRED, 9, effort=0.2), PAIRED, 9)
    assert found.schedule.placement == BIDIRECTIONAL
    assert found.makespan <= Fraction("32.6")


@pytest.mark.parametrize("num_micro_batches", [1, 7, 21])
def test_an_odd_number_is_no_longer_than_the_even_one_after_it(num_micro_batches: int) -> None:
    odd = checked(solve(4, num_micro_batches, PAIRED, 5, effort=QUICK), PAIRED, 5)
    even = solve(4, num_micro_batches + 1, PAIRED, 5, effort=QUICK)
    assert odd.makespan <= even.makespan


def test_a_long_run_is_a_short_one_with_more_periods() -> None:
    cores: Cores = {}
    runs = [checked(solve(4, n, PAIRED, 5, QUICK, cores), PAIRED, 5) for n in (40, 42, 60)]
    assert len(cores) == 1
    period = 2 * PAIRED.two("BF")
    assert [run.makespan - runs[0].makespan for run in runs] == [0, period, 10 * period]
    assert runs[0].makespan < simulate(named(4, 40, 5)[-1], PAIRED).makespan


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_other_numbers_of_ranks(num_ranks: int) -> None:
    found = checked(solve(num_ranks, 9, PAIRED, 6, effort=QUICK), PAIRED, 6)
    if num_ranks == 1:  # the first F and the last B alone, the rest in pairs
        assert found.makespan == 8 * PAIRED.two("BF") + 3


def test_a_rank_that_is_slow_needs_lists_of_its_own() -> None:
    table = replace(PAIRED, ranks=tuple(map(Fraction, (1, 1, 1, 2))))
    found = checked(solve(4, 8, table, 5, effort=0.1), table, 5)
    assert found.makespan < min(simulate(each, table).makespan for each in named(4, 8, 5))


def test_under_the_tightest_cap_one_micro_batch_goes_at_a_time() -> None:
    found = checked(solve(4, 3, Costs(), 1, effort=QUICK), Costs(), 1)
    assert found.makespan == 3 * 4 * 3


def test_a_cap_that_nothing_fits_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(ValueError, match="use cap = 1"):
        solve(4, 8, Costs(), 0)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_sizes_of_nothing_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 rank and 1 micro-batch"):
        solve(*sizes, Costs())


def test_weights_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="weights of 3 stages"):
        solve(4, 8, Costs(stages=(Fraction(1),) * 3))


def test_the_same_arguments_give_the_same_schedule() -> None:
    one, other = (solve(4, 10, any_pairs(PAIRED), 5, effort=0.1) for _ in range(2))
    assert one == other


def test_the_bound_is_that_of_the_placement_and_the_cap() -> None:
    found = solve(4, 8, PAIRED, 5, effort=QUICK)
    assert found.lower_bound == lower_bound(BIDIRECTIONAL, 4, 8, PAIRED, 5)


def test_without_a_cap_a_rank_holds_as_much_as_under_dualpipe() -> None:
    assert default_cap(8) == max(simulate(named(8, 16, None)[-1], Costs()).peak_activations)


def test_progress_is_told_from_nothing_to_all() -> None:
    shares: list[float] = []
    solve(4, 8, PAIRED, 5, effort=QUICK, report=shares.append)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
