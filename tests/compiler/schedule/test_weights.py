"""Weights of stages by kind: reading, times against a judge, bounds against least makespans, gain of the search."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.schedule import SCHEDULES
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs, costs_of_json
from compiler.schedule.measure import measure
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solver
from compiler.schedule.unequal_bound import bound_of_unequal
from compiler.schedule.weights import StagePairs, Weight, as_weight, cut_anew, round_weights
from runtime.contract.actions import Action, Pair
from tests.compiler.schedule.independent import judge
from tests.compiler.schedule.optima import Case, case
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

ONES = '{"F": 1, "I": 2, "W": 3, "stages": %s}'


def uneven(rng: random.Random, stages: int) -> tuple[Weight, ...]:
    return tuple(Weight.of_factors(Fraction(rng.choice((6, 10, 10, 15)), 10) for _ in "FBIW") for _ in range(stages))


def with_pairs(rng: random.Random, costs: Costs) -> Costs:
    """The costs with pairs per stage, each with a different gain."""
    labelled = tuple(weight._replace(label=rng.randint(1, 3)) for weight in map(as_weight, costs.stages))
    sides = [(kind, label) for label in (1, 2, 3) for kind in "FBIW"]
    shares = (Fraction(rng.randint(5, 14), 10) for _ in range(200))
    pairs = [(a, b, share) for (a, b), share in zip(combinations_with_replacement(sides, 2), shares, strict=False)]
    return replace(costs, stages=labelled, stage_pairs=StagePairs(tuple(pairs)))


def judged(schedule, costs: Costs) -> Fraction:  # type: ignore[no-untyped-def]
    times = {kind: costs.lone_time(kind) for kind in "FBIW"} | dict(costs.pairs)
    weights = [dict(zip("FBIW", as_weight(weight).factors, strict=True)) for weight in costs.stages]
    return judge(schedule.to_text(), times, costs.latency, weights).makespan


# ---------------------------------------------------------------- reading


def test_omitted_kinds_weigh_1_and_b_follows_from_i_and_w() -> None:
    costs = costs_of_json(ONES % '[2, {"W": 2, "F": 1.5}, {"I": 0, "B": 0.5}]')
    assert costs.stages[0] == 2
    assert costs.stages[1] == Weight(Fraction(3, 2), Fraction(2 + 6, 5), Fraction(1), Fraction(2))
    assert costs.stages[2] == Weight(Fraction(1), Fraction(1, 2), Fraction(0), Fraction(1))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ('[{"X": 1}]', "objects of F, I, W and B"),
        ("[{}]", "objects of F, I, W and B"),
        ('[{"F": 0}]', "objects of F, I, W and B"),
        ('[{"F": [1]}]', "objects of F, I, W and B"),
        ('[{"I": 0, "W": 0}]', "whose I and W take nothing"),
    ],
)
def test_invalid_weights_suggest_a_correction(stages: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{1,200}$") as caught:
        costs_of_json(ONES % stages)
    assert said in str(caught.value)


@pytest.mark.parametrize("wanted", [2, 6, 8, 12])
def test_recutting_keeps_the_time_of_each_kind(wanted: int) -> None:
    weights = (*uneven(random.Random(wanted), 3), Fraction(2))
    anew = cut_anew(weights, wanted)
    for kind in "FBIW":
        old_total, new_total = (
            sum(as_weight(weight).factor(kind) for weight in stage_weights) for stage_weights in (weights, anew)
        )
        assert old_total * wanted == new_total * len(weights)


def test_rounded_in_parts() -> None:
    third = Fraction(1, 3)
    assert round_weights((third, Weight(third, 0 * third, 1 + third, third)), 10) == (
        Fraction(3, 10),
        Weight(Fraction(3, 10), Fraction(1, 10), Fraction(13, 10), Fraction(3, 10)),
    )


# ---------------------------------------------------------------- times


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_judge_of_the_text_agrees(name: str) -> None:
    rng = random.Random(name)
    for ranks, micro_batches in ((2, 4), (4, 8)):
        schedule = SCHEDULES[name].generate(ranks, micro_batches)
        stages = schedule.num_stages
        costs = replace(random_costs(rng, stages, ranks), ranks=(), stages=uneven(rng, stages))
        assert simulate(schedule, costs).makespan == judged(schedule, costs)


def test_a_pair_of_labelled_stages_takes_its_share() -> None:
    first, second = (
        Weight.of_factors(map(Fraction, factors), label) for factors, label in (((1, 2, 1, 1), 1), ((3, 1, 1, 1), 2))
    )
    pairs = StagePairs(((("B", 1), ("F", 2), Fraction(7, 10)), (("F", 1), ("F", 1), Fraction(1, 2))))
    costs = Costs(stages=(first, second), ranks=(Fraction(2),), stage_pairs=pairs, pairs=(("BF", Fraction(1)),))
    B0, F1 = Action("B", 0, 0), Action("F", 1, 1)
    assert costs.step_time(Pair(B0, F1), 0) == costs.step_time(Pair(F1, B0), 0) == 2 * (2 * 2 + 3) * Fraction(7, 10)
    assert costs.step_time(Pair(Action("F", 0, 0), Action("F", 0, 1)), 0) == 2
    assert costs.step_time(Pair(Action("F", 0, 0), Action("B", 1, 1)), 0) == 2 * (1 + 2)  # unknown
    assert costs.gains() == {"BF", "FF"}
    longer = replace(costs, micro_batches=(Fraction(9), Fraction(1)))  # only the B of the long one counts
    assert longer.step_time(Pair(B0, F1), 0) == 9 * 2 * 2 * 2


# ---------------------------------------------------------------- bounds


def weighed(number: int) -> Case:
    """A stored small case with stage weights by kind."""
    problem, rng = case(number), random.Random(f"by kind {number}")
    stages = problem.placement.num_stages(problem.num_ranks)
    # On some stages more than I and W, on others less.
    B = rng.choice((None, problem.costs.lone_time("B") * Fraction(4, 5)))
    costs = replace(problem.costs, B=B, stages=uneven(rng, stages))
    return replace(problem, costs=with_pairs(rng, costs) if number % 3 == 0 else costs)


@pytest.mark.parametrize("first", range(0, 240, 30))
def test_bounds_are_not_above_the_least_makespan(first: int) -> None:
    optimal = pytest.importorskip("tests.compiler.schedule.optimal", exc_type=ImportError)
    solved = reached = 0
    for problem in map(weighed, range(first, first + 30)):
        P, N, costs, cap = problem.num_ranks, problem.num_micro_batches, problem.costs, problem.cap
        if problem.placement.num_stages(P) * N > 6:
            continue
        least = optimal.optimum(problem.placement, P, N, costs, cap, work=0.1)
        if least is None:
            continue
        bound = lower_bound(problem.placement, P, N, costs, cap)
        alike = replace(costs, micro_batches=(Fraction(1),) * N)
        assert max(bound, bound_of_unequal(problem.placement, P, N, alike)) <= least, problem
        solved, reached = solved + 1, reached + (bound == least)
    assert solved >= 3 and reached >= solved / 2


@pytest.mark.parametrize("seed", range(3))
def test_no_order_at_all_is_shorter(seed: int) -> None:
    rng = random.Random(seed)
    for placement, ranks, count in ((BIDIRECTIONAL, 2, 2), (ONE_STAGE, 2, 2), (V, 1, 2), (loop(2), 1, 2)):
        stages = placement.num_stages(ranks)
        costs = replace(random_costs(rng, stages, ranks), stages=uneven(rng, stages))
        costs = with_pairs(rng, costs) if seed else costs
        best = best_makespan(placement, ranks, count, costs, 3)
        solution = Solver(costs, 3, effort=0.02).solve_on(placement, ranks, count)
        assert best is not None and solution.lower_bound <= best <= solution.makespan
        assert lower_bound(placement, ranks, count, costs, 3) <= best


def test_the_excess_uses_weights_by_kind() -> None:
    costs = Costs(stages=(Weight(Fraction(1), Fraction(2), Fraction(1), Fraction(3)), Fraction(1)))
    measured = measure(SCHEDULES["1f1b"].generate(2, 6), costs)
    assert measured.makespan - measured.excess == 6 * (1 + 2 * 2)


# ---------------------------------------------------------------- the search


@pytest.mark.parametrize("seed", range(3))
def test_the_search_of_weights_by_kind(seed: int) -> None:
    """Its makespan equals the judge's, and is shorter than that of the search with the mean weight of each stage."""
    rng = random.Random(seed)
    costs = Costs(pairs=(("BF", Fraction(12, 5)),), stages=uneven(rng, 4))
    blurred = replace(costs, stages=tuple((w.F + w.B + w.I + w.W) / 4 for w in map(as_weight, costs.stages)))
    makespans = []
    for table in (costs, blurred):
        solution = Solver(table, 5, effort=0.1).solve_on(BIDIRECTIONAL, 4, 8)
        assert solution.makespan == judged(solution.schedule, table) >= solution.lower_bound
        makespans.append(judged(solution.schedule, costs))
    assert makespans[0] < makespans[1]
