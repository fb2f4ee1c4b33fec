"""The lower bound compared with the least makespans of random small cases, and faults that these would show."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

import pytest

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.schedule.bound import lower_bound
from compiler.schedule.costs import Costs
from compiler.schedule.waits import Waits
from tests.compiler.schedule.optima import STORED, Case, case, stored
from tests.compiler.schedule.test_simulate import random_costs
from tests.compiler.schedule.tiny import best_makespan

SOLVED = list(stored())


def bound_of(case: Case, cap: int | None = None) -> Fraction:
    return lower_bound(case.placement, case.num_ranks, case.num_micro_batches, case.costs, cap or case.cap)


def test_the_bound_is_near_and_never_above() -> None:
    bounds = [(bound_of(case), least) for case, least in SOLVED]
    assert all(bound <= least for bound, least in bounds)
    gaps = [least / bound - 1 for bound, least in bounds]
    assert len(gaps) >= 190 and sum(gaps) / len(gaps) < Fraction(1, 1000) and max(gaps) < Fraction(3, 100)


@pytest.mark.parametrize("number", range(0, 40))
def test_stored_makespans_are_the_least(number: int) -> None:
    """Two methods that share nothing, on small cases: one tries every order, the other never lists any."""
    optimal = pytest.importorskip("tests.compiler.schedule.optimal", exc_type=ImportError)
    problem = case(number)
    P, N, costs = problem.num_ranks, problem.num_micro_batches, problem.costs
    stored_least = json.loads(STORED.read_text("utf-8"))[str(number)][1]
    least = optimal.optimum(problem.placement, P, N, costs, problem.cap, work=0.3)
    assert least is None or stored_least == str(least)


@pytest.mark.parametrize("seed", range(6))
def test_the_model_agrees_with_all_orders(seed: int) -> None:
    optimal = pytest.importorskip("tests.compiler.schedule.optimal", exc_type=ImportError)
    rng = random.Random(seed)
    placement, ranks, count = ((BIDIRECTIONAL, 2, 2), (ONE_STAGE, 2, 2), (V, 1, 2), (loop(2), 1, 2))[seed % 4]
    costs, cap = random_costs(rng, placement.num_stages(ranks), ranks), rng.randint(2, 4)
    best = best_makespan(placement, ranks, count, costs, cap)
    for in_order in (False, True):  # that stages keep to the order of micro-batches costs nothing
        assert optimal.optimum(placement, ranks, count, costs, cap, in_order=in_order) == best


# ---------------------------------------------------------------- faults


def room_one_early(waits: Waits) -> object:
    return [(slot, backward, max(1, lag - 1), time) for slot, backward, lag, time in ROOM.func(waits)]


def room_until_w(waits: Waits) -> object:
    w = max(waits.quickest["W", slot] for slot in waits.rank)
    return [(slot, backward, lag, time + w) for slot, backward, lag, time in ROOM.func(waits)]


def no_pairs(waits: Waits) -> object:
    return [[(items, time) for items, time in steps if len(items) == 1] for steps in STEPS.func(waits)]


def whole_backwards(waits: Waits) -> object:
    return {slot: waits.quickest["B", slot] for slot in waits.rank}


def messages_at_home(waits: Waits) -> object:
    return {slot: int(waits.costs.latency / waits.unit) for slot in waits.rank if slot[1] < waits.last}


ROOM, STEPS = (vars(Waits)[name] for name in ("room", "_steps"))
FAULTS: dict[str, tuple[str, Callable[[Waits], object]]] = {
    "a forward finds room too late": ("room", room_one_early),
    "a forward waits for a W that others run": ("room", room_until_w),
    "no pair is known": ("_steps", no_pairs),
    "a backward is never split": ("back", whole_backwards),
    "a message to the own rank takes time": ("hop", messages_at_home),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = FAULTS[fault]
    changed = cached_property(wrong)
    changed.__set_name__(Waits, name)
    monkeypatch.setattr(Waits, name, changed)
    assert any(bound_of(case) > least for case, least in SOLVED)


def test_a_percent_too_much_is_seen() -> None:
    assert any(bound_of(case) * Fraction(101, 100) > least for case, least in SOLVED)


def test_one_activation_too_few_is_seen() -> None:
    tight = [(problem, least) for problem, least in SOLVED if problem.cap > problem.placement.stages_per_rank]
    assert any(bound_of(problem, problem.cap - 1) > least for problem, least in tight)


# ---------------------------------------------------------------- memory and time


def test_all_in_turn() -> None:
    """One activation: a micro-batch has to be back before the next one starts."""
    assert lower_bound(ONE_STAGE, 4, 4, Costs(), 1) == 36  # the optimum
    slow = replace(Costs(), latency=Fraction(1))
    assert lower_bound(ONE_STAGE, 4, 40, slow, 1) == 40 * (9 + 6)
    assert lower_bound(BIDIRECTIONAL, 4, 2, Costs(), 1) == 6 + 9  # the second starts where the first has turned


def test_two_at_a_time() -> None:
    assert lower_bound(ONE_STAGE, 4, 40, Costs(), 2) >= 20 * 9  # lives of 9, two at a time


def test_times_of_any_precision() -> None:
    """A fine unit gives large numbers; the bound equals that of the same times in a coarse unit."""
    fine = Fraction(1, 10**20 + 39)
    costs = Costs(F=1 + fine, I=1 + fine, W=1 + fine, stages=(Fraction(1), Fraction(10**9, 10**9 + 7)) * 2)
    bounds = [lower_bound(V, 2, 3, table, 4) for table in (costs, Costs())]
    assert abs(bounds[0] - bounds[1]) < Fraction(1, 10**6)


def test_caps_by_rank() -> None:
    bounds = [lower_bound(ONE_STAGE, 4, 6, Costs(), caps) for caps in ((4, 4, 4, 4), (4, 4, 2, 1), (2, 4, 4, 4))]
    assert bounds[0] == lower_bound(ONE_STAGE, 4, 6, Costs(), 4) <= bounds[1] < bounds[2]
    assert bounds[2] <= lower_bound(ONE_STAGE, 4, 6, Costs(), 2)
