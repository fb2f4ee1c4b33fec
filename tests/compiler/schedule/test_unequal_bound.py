"""The lower bound for micro-batches of unequal costs, against all schedules of tiny cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule import SCHEDULES
from compiler.schedule.costs import Costs
from compiler.schedule.measure import measure
from compiler.schedule.numbering import number_micro_batches
from compiler.schedule.slots import F0, I0, W0
from compiler.schedule.unequal_bound import bound_of_unequal
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

TINY = [(BIDIRECTIONAL, 2, 2), (ONE_STAGE, 2, 2), (V, 1, 2), (loop(2), 1, 2), (ONE_STAGE, 1, 3)]
UNEVEN = tuple(Fraction(tenths, 10) for tenths in (11, 4, 23, 7, 15, 5, 9, 18, 3, 6, 12, 8))


def bounds_and_bests(seed: int, in_pairs: bool) -> Iterator[tuple[Fraction, Fraction]]:
    """The bound of random tiny cases, and the least makespan of all schedules and orders of micro-batches."""
    rng = random.Random(seed)
    for placement, ranks, count in TINY:
        costs = random_costs(rng, placement.num_stages(ranks), ranks)
        costs = replace(costs, keeps=Fraction(rng.randint(0, 2), 2), pairs=costs.pairs if in_pairs else ())
        weights = [Fraction(rng.randint(1, 9), rng.choice((1, 2))) for _ in range(count)]
        cap = rng.randint(placement.stages_per_rank, 3)
        orders = [replace(costs, micro_batches=order) for order in permutations(weights)]
        bests = [best_makespan(placement, ranks, count, order, cap) for order in orders]
        least = min((best for best in bests if best is not None), default=None)
        if least is not None:
            yield min(bound_of_unequal(placement, ranks, count, order, cap) for order in orders), least


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_at_all_is_shorter(seed: int) -> None:
    """This includes pairs that take less than one of their actions alone."""
    cases = list(bounds_and_bests(seed, in_pairs=True))
    assert all(0 < bound <= best for bound, best in cases) and len(cases) >= 4


def test_it_is_near_the_best_without_pairs() -> None:
    """A pair of unequal micro-batches gains less than the bound assumes, so these cases have no pairs."""
    cases = [case for seed in range(8) for case in bounds_and_bests(seed, in_pairs=False)]
    assert all(bound <= best for bound, best in cases)
    assert sum(bound == best for bound, best in cases) > len(cases) / 2
    assert sum(best / bound for bound, best in cases) < Fraction(11, 10) * len(cases)


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_a_cap_of_one_activation_puts_micro_batches_in_turn(ranks: int) -> None:
    """Rank 0 holds its activation while a micro-batch goes to the last rank and back, so all these times add up."""
    count = len(UNEVEN)
    slots = [(F0,), (I0,), (W0,)] * count
    schedule = number_micro_batches("serial", ranks, count, ONE_STAGE, lambda rank: slots)
    measured = measure(schedule, Costs(micro_batches=UNEVEN), cap=Fraction(1))
    assert measured.lower_bound == measured.makespan == (2 * ranks + 1) * sum(UNEVEN)
    assert bound_of_unequal(ONE_STAGE, ranks, count, measured.costs) < measured.lower_bound


def test_a_cap_for_each_rank() -> None:
    costs = Costs(micro_batches=UNEVEN)
    wide = bound_of_unequal(ONE_STAGE, 4, len(UNEVEN), costs, (12, 12, 12, 12))
    assert wide == bound_of_unequal(ONE_STAGE, 4, len(UNEVEN), costs)
    assert bound_of_unequal(ONE_STAGE, 4, len(UNEVEN), costs, (1, 12, 12, 12)) == 9 * sum(UNEVEN)
    assert bound_of_unequal(ONE_STAGE, 4, len(UNEVEN), costs, (12, 1, 12, 12)) < 9 * sum(UNEVEN)


def test_what_an_input_gradient_frees_is_not_held_until_its_weight_gradient() -> None:
    """The W then run while the next micro-batch is on rank 1."""
    costs = Costs(micro_batches=UNEVEN, keeps=Fraction(0))
    assert bound_of_unequal(ONE_STAGE, 2, 12, costs, 1) == 4 * sum(UNEVEN)
    weights = Fraction(3), Fraction(2)
    tiny = replace(costs, micro_batches=weights)
    assert bound_of_unequal(ONE_STAGE, 2, 2, tiny, 1) == 20
    assert best_makespan(ONE_STAGE, 2, 2, tiny, 1) == 22  # and the last W


def test_activations_on_the_host_do_not_count() -> None:
    costs = Costs(micro_batches=UNEVEN, O=Fraction(1), R=Fraction(1))
    assert bound_of_unequal(ONE_STAGE, 4, 12, costs, 1) == bound_of_unequal(ONE_STAGE, 4, 12, costs)


@pytest.mark.parametrize("placement", [ONE_STAGE, V, BIDIRECTIONAL, loop(3)], ids=str)
def test_less_memory_cannot_help(placement: StagePlacement) -> None:
    costs = replace(random_costs(random.Random(1), placement.num_stages(4), 4), micro_batches=UNEVEN)
    bounds = [bound_of_unequal(placement, 4, 12, costs, cap) for cap in (1, 2, 3, 5, 8, 12)]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_named_schedule_is_shorter(name: str) -> None:
    rng = random.Random(name)
    for ranks, count in ((2, 4), (4, 8), (6, 12)):
        schedule = SCHEDULES[name].generate(ranks, count)
        for _ in range(4):
            costs = replace(random_costs(rng, schedule.num_stages, ranks), keeps=Fraction(rng.randint(0, 2), 2))
            weights = tuple(Fraction(rng.randint(1, 20), 4) for _ in range(count))
            assert measure(schedule, replace(costs, micro_batches=weights)).gap >= 0
