"""Proofs: what the search finds is the least there is, where constraint programming can tell."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.schedules.costs import Costs, parse_costs
from compiler.schedules.dualpipe import dualpipe
from compiler.schedules.interleaved import interleaved
from compiler.schedules.simulate import peak_activations, simulate
from compiler.solver import Solver
from compiler.solver.exact import prove
from compiler.stage_placement import BIDIRECTIONAL, V, loop
from tests.schedules.optimal import optimum
from tests.solver.test_least import TABLES, least

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")


def test_the_search_finds_the_least_of_four_ranks() -> None:
    found = Solver(PAIRED, 5).solve(4, 8, placement=BIDIRECTIONAL)
    schedule, makespan, bound = prove(found.schedule, PAIRED, 5, work=20)
    assert found.makespan == makespan == bound == Fraction("20.4") == simulate(schedule, PAIRED).makespan


@pytest.mark.parametrize("name", TABLES)
def test_the_least_is_that_of_all_orders(name: str) -> None:
    """Two programs that have nothing in common: one tries every order, the other never lists any."""
    table = parse_costs(TABLES[name])
    found = Solver(table, 3, effort=0.02).solve(4, 2, placement=BIDIRECTIONAL)
    _, makespan, bound = prove(found.schedule, table, 3, work=20)
    assert makespan == bound <= least(4, 2, table, 3)


def test_it_goes_on_from_a_schedule_that_is_not_the_best() -> None:
    start = dualpipe(4, 8)
    schedule, makespan, _ = prove(start, PAIRED, 5, work=20)
    schedule.check()
    assert makespan == simulate(schedule, PAIRED).makespan < simulate(start, PAIRED).makespan
    assert max(peak_activations(schedule)) <= 5


def test_other_forms() -> None:
    table = replace(PAIRED, latency=Fraction(1, 2))
    for num_ranks, num_micro_batches in ((3, 4), (2, 3)):
        found = Solver(table, 3, effort=0.05).solve(num_ranks, num_micro_batches)
        assert found.cap is not None
        _, makespan, bound = prove(found.schedule, found.costs, found.cap, work=20)
        assert bound <= makespan <= found.makespan


def test_several_stages_a_rank() -> None:
    start = interleaved(2, 4, 2)
    schedule, makespan, bound = prove(start, Costs(), 5, work=20)
    assert makespan == bound == simulate(schedule, Costs()).makespan < simulate(start, Costs()).makespan
    assert schedule.stage_placement == loop(2) and max(peak_activations(schedule)) <= 5


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "cap", "costs"),
    [(2, 3, 1, "F=1,I=1,W=1"), (2, 2, 1, "F=2,I=3,W=1"), (2, 2, 2, "F=1,I=1,W=1,FB=1.8")],
)
def test_small_schedules_are_proven(num_ranks: int, num_micro_batches: int, cap: int, costs: str) -> None:
    """The bound of what is found is met, and no placement has less by a program that shares nothing with the search."""
    P, N, table = num_ranks, num_micro_batches, parse_costs(costs)
    found = Solver(table, cap).solve(P, N)
    assert found.makespan == found.lower_bound
    for placement in (BIDIRECTIONAL, V, loop(2)):
        stages = placement.num_stages(P)
        least = optimum(placement, P, N, table.recut(P, stages), cap * stages // P)
        assert least is None or found.makespan <= least
        assert placement != found.schedule.stage_placement or least in (None, found.makespan)


@pytest.mark.parametrize("num_micro_batches", [3, 24])
def test_times_of_a_unit_too_fine_for_a_proof(num_micro_batches: int) -> None:
    """Sums of such times are too large for the solver: the search goes without it, as a whole and for the period."""
    fine = Costs(F=Fraction(10**22 + 1, 10**22), pairs=(("BF", Fraction(18 * 10**21 + 1, 10**22)),))
    found = Solver(fine, 3, effort=0.02).solve(3, num_micro_batches, placement=V)
    assert found.makespan == simulate(found.schedule, found.costs).makespan >= found.lower_bound


def test_without_or_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match=r"dsc-trainer\[solve\]"):
        prove(dualpipe(4, 8), PAIRED, 5, work=1)
