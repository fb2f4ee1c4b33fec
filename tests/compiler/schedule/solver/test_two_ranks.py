"""The shortest schedule of two ranks, beside models that share nothing with it, and what only it has proven."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import parse_costs
from compiler.schedule.simulate import held_at_most, simulate
from compiler.schedule.solver import two_ranks
from compiler.schedule.solver.two_ranks import ShortestSchedule, shortest_of_two
from tests.compiler.schedule.independent import judge
from tests.compiler.schedule.optima import Case, stored
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

PAIRED = parse_costs("F=1,I=1,W=1,FB=1.8")
SOLVED = [(each, least) for each, least in stored() if each.num_ranks == 2 and not each.costs.latency]
ENOUGH = 200_000


def shortest(asked: Case, below: Fraction, work: int = ENOUGH) -> ShortestSchedule:
    caps = (Fraction(asked.cap),) * 2
    return shortest_of_two(asked.placement, asked.num_micro_batches, asked.costs, caps, (Fraction(0), below), work)


@pytest.mark.parametrize("number", range(len(SOLVED)))
def test_the_least_is_found_and_proven(number: int) -> None:
    """Beside the stored least makespans: any table of pairs, weights and cap."""
    asked, least = SOLVED[number]
    assert shortest(asked, least) == replace(shortest(asked, least), schedule=None, least=least)
    found = shortest(asked, least + 1)
    assert found.least == least and found.schedule is not None
    found.schedule.check()
    assert simulate(found.schedule, asked.costs).makespan == least
    assert max(held_at_most(found.schedule, Fraction(1))) <= asked.cap


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_shorter_by_all_orders(seed: int) -> None:
    """Also where a W keeps less than an activation, and stages weigh by kind."""
    rng = random.Random(seed)
    for placement in (BIDIRECTIONAL, ONE_STAGE):
        costs = random_costs(rng, placement.num_stages(2), 2)
        costs = replace(costs, latency=Fraction(0), keeps=rng.choice((Fraction(1), Fraction(1, 2), Fraction(0))))
        cap = rng.randint(1, 3)
        best = best_makespan(placement, 2, 2, costs, cap)
        assert best is not None
        found = shortest(Case(placement, 2, 2, costs, cap), best + 1)
        assert found.schedule is not None and simulate(found.schedule, costs).makespan == found.least == best


@pytest.mark.parametrize(
    ("chunks", "num_micro_batches", "cap", "below", "least"),
    [(3, 4, 2, "10.9", "10.8"), (4, 5, 3, "12", "11.9"), (4, 4, 2, "10.65", "10.5")],
)
def test_what_pairs_make_of_two_ranks(chunks: int, num_micro_batches: int, cap: int, below: str, least: str) -> None:
    """No other program has shown these, for all that CP-SAT was given; that one is reached is judged by its text."""
    costs, caps = PAIRED.recut(2, 2 * chunks), (Fraction(cap * chunks),) * 2
    bound = lower_bound(loop(chunks), 2, num_micro_batches, costs, caps, 1_000_000)
    found = shortest_of_two(loop(chunks), num_micro_batches, costs, caps, (bound, Fraction(below)), 500_000)
    assert found.schedule is not None and bound <= found.least == Fraction(least)
    judged = judge(found.schedule.to_text(), {kind: costs.one(kind) for kind in "FBIW"} | dict(costs.pairs))
    assert judged.makespan == found.least and max(judged.peaks) <= cap * chunks


def test_where_it_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages, copies and many states are left to others; little work shows what it has shown, and none takes no
    time."""
    asked = Case(V, 2, 3, PAIRED.recut(2, 4), 4)
    slow = replace(asked, costs=replace(asked.costs, latency=Fraction(1)))
    assert shortest(slow, Fraction(9)) == ShortestSchedule(None, Fraction(0), ENOUGH)
    large = replace(asked, num_micro_batches=40)
    assert shortest(large, Fraction(90)) == ShortestSchedule(None, Fraction(0), ENOUGH)
    little = shortest(asked, Fraction(9), 10)
    assert little.schedule is None and little.work <= 0 and little.least <= shortest(asked, Fraction(9)).least
    monkeypatch.delattr(two_ranks, "SmallPipeline")
    assert shortest(slow, Fraction(9)) == ShortestSchedule(None, Fraction(0), ENOUGH)
    assert shortest(asked, Fraction(9), 0) == ShortestSchedule(None, Fraction(0), 0)
