"""Proofs: what the search finds is the least there is, where constraint programming can tell."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, V, loop
from compiler.schedule.costs import Costs, parse_costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.solver import Solver
from compiler.schedule.solver.exact import Exact, exact
from compiler.schedule.solver.problem import ScheduleProblem, make_problem, schedule_of_slots
from tests.compiler.schedule.optima import Case, stored
from tests.compiler.schedule.optimal import optimum
from tests.compiler.schedule.solver.test_least import TABLES, least

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
SOLVED = list(stored())


def problem_of(case: Case) -> ScheduleProblem:
    return make_problem(case.placement, case.num_ranks, case.num_micro_batches, case.costs, case.cap)


def shorter(case: Case, makespan: Fraction, work: float = 5) -> tuple[Exact, Schedule | None]:
    """What is found that takes less than a makespan."""
    problem = problem_of(case)
    ticks = makespan / problem.unit
    assert ticks.denominator == 1
    found = exact(problem, case.costs, int(ticks), work)
    return found, schedule_of_slots(problem, found.slots) if found.slots else None


@pytest.mark.parametrize("number", range(len(SOLVED)))
def test_the_least_is_found_and_proven(number: int) -> None:
    """Beside a model that shares nothing with this one: any placement, table of pairs, weights, latency and cap."""
    case, best = SOLVED[number]
    found, schedule = shorter(case, best)
    assert found.proven and schedule is None
    found, schedule = shorter(case, best + 3 * problem_of(case).unit)
    if schedule is None:  # rows have no order of W of uneven stages but that of their I
        assert not found.proven and not problem_of(case).one_w
        return
    assert found.makespan * problem_of(case).unit == best == simulate(schedule, case.costs).makespan
    assert found.proven and max(peak_activations(schedule)) <= case.cap
    schedule.check()


@pytest.mark.parametrize("name", TABLES)
def test_the_least_of_mirrored_orders_is_not_below_it(name: str) -> None:
    """A program that tries every order of mirrored ranks finds nothing that is shorter than what is proven."""
    case = Case(BIDIRECTIONAL, 4, 2, parse_costs(TABLES[name]), 3)
    mirrored = least(4, 2, case.costs, 3)
    found, _ = shorter(case, mirrored + problem_of(case).unit)
    assert found.proven and found.makespan * problem_of(case).unit <= mirrored


def test_the_search_finds_the_least_of_four_ranks() -> None:
    found = Solver(PAIRED, 5).solve(4, 4, placement=BIDIRECTIONAL)
    assert found.makespan == found.lower_bound == simulate(found.schedule, PAIRED).makespan


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "cap", "costs"),
    [(2, 2, 2, "FB=1.8"), (2, 3, 1, "F=1,I=1,W=1"), (2, 2, 1, "F=2,I=3,W=1"), (2, 3, 2, "FB=1.8"), (3, 2, 3, "FB=1.8")],
)
def test_small_schedules_are_proven(num_ranks: int, num_micro_batches: int, cap: int, costs: str) -> None:
    """The bound of what is found is met, and no placement has less by a program that shares nothing with the search."""
    P, N, table = num_ranks, num_micro_batches, parse_costs(costs)
    found = Solver(table, cap).solve(P, N)
    assert found.makespan == found.lower_bound
    for placement in (BIDIRECTIONAL, V, loop(2)) if P % 2 == 0 else (V, loop(2)):
        stages = placement.num_stages(P)
        best = optimum(placement, P, N, table.recut(P, stages), cap * stages // P, work=1)
        assert best is None or found.makespan <= best
        assert placement != found.schedule.stage_placement or best in (None, found.makespan)


@pytest.mark.parametrize("num_micro_batches", [3, 24])
def test_times_of_a_unit_too_fine_for_a_proof(num_micro_batches: int) -> None:
    """Sums of such times are too large for the solver: the search goes without it, as a whole and for the period."""
    fine = Costs(F=Fraction(10**22 + 1, 10**22), pairs=(("BF", Fraction(18 * 10**21 + 1, 10**22)),))
    found = Solver(fine, 3, effort=0.02).solve(3, num_micro_batches, placement=V)
    assert found.makespan == simulate(found.schedule, found.costs).makespan >= found.lower_bound


def test_several_stages_a_rank_with_messages() -> None:
    case = Case(loop(2), 2, 4, replace(Costs(), latency=Fraction(1, 2)), 5)
    found, schedule = shorter(case, Fraction(100), 20)
    assert schedule and found.proven and max(peak_activations(schedule)) <= 5


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match=r"dsc-trainer\[solve\]"):
        shorter(Case(V, 4, 2, PAIRED, 5), Fraction(30))
    assert Solver(PAIRED, 2, effort=0.02).solve(2, 2).makespan > 0
