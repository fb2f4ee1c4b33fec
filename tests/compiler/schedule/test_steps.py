"""Schedules that are kept as numbers: the same steps, times and peaks as those of actions, on any machine of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, StagePlacement, V, loop
from compiler.schedule import SCHEDULES, numbering, rounds
from compiler.schedule.costs import Costs, any_pairs, parse_costs
from compiler.schedule.schedule import Schedule, ScheduleError, is_in_numbers
from compiler.schedule.simulate import simulate
from compiler.schedule.solver import Solver
from compiler.schedule.steps import LazySteps, is_legal
from compiler.schedule.zero_bubble import zbv_both_ways
from runtime.contract.actions import actions_of
from tests.compiler.schedule.solver.cases import costs


@contextmanager
def in_numbers(wide: bool = True) -> Iterator[None]:
    """All schedules are large, and run as those of many ranks, or as those of few."""
    ranks = 0 if wide else 1_000
    with mock.patch.object(numbering, "LARGE", 0), mock.patch.object(rounds, "_WIDE", ranks):
        yield


def legal(schedule: Schedule) -> bool:
    """Whether it is legal as far as its numbers say."""
    rows = [steps for steps in schedule.actions if isinstance(steps, LazySteps)]
    return is_legal(rows, schedule.num_micro_batches, schedule.stage_placement)


@settings(max_examples=60)
@given(st.data())
def test_they_take_and_hold_what_actions_do(data: st.DataObject) -> None:
    P, N = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 14))
    name = data.draw(st.sampled_from([name for name, row in SCHEDULES.items() if row.has(P, N)]))
    chunks = data.draw(st.integers(2, 3))
    plain = SCHEDULES[name].generate(P, N, chunks)
    table = data.draw(costs(plain.num_stages))
    keeps = data.draw(st.sampled_from([Fraction(0), Fraction(1, 4), Fraction(1)]))
    weights = data.draw(st.just(()) | st.lists(st.sampled_from([Fraction(1), Fraction(3)]), min_size=N, max_size=N))
    table = replace(table, keeps=keeps, micro_batches=tuple(weights), ranks=())
    with in_numbers(data.draw(st.booleans())):
        large = SCHEDULES[name].generate(P, N, chunks)
        assert all(map(is_in_numbers, large.actions)) and legal(large)
        assert large == plain and plain == large and large.to_text() == plain.to_text()
        found, wanted = simulate(large, table), simulate(plain, table)
    assert (found.ticks, found.unit, found.peak_activations) == (wanted.ticks, wanted.unit, wanted.peak_activations)


@pytest.mark.parametrize("placement", [BIDIRECTIONAL, V, loop(2)])
@pytest.mark.parametrize("num_micro_batches", [7, 12])
def test_auto_is_the_same(placement: StagePlacement, num_micro_batches: int) -> None:
    table = any_pairs(parse_costs("FB=1.8"))
    plain = Solver(table, 4, effort=0.003).solve_on(placement, 4, num_micro_batches).schedule
    with in_numbers():
        large = Solver(table, 4, effort=0.003).solve_on(placement, 4, num_micro_batches).schedule
    assert large == plain and is_in_numbers(large.actions[0])


@pytest.mark.parametrize("num_micro_batches", [5, 9])
def test_of_an_odd_number_the_last_one_is_left_out(num_micro_batches: int) -> None:
    plain = zbv_both_ways(4, num_micro_batches)
    with in_numbers():
        assert zbv_both_ways(4, num_micro_batches) == plain
        more = zbv_both_ways(4, num_micro_batches + 1).actions
    assert [steps.before(num_micro_batches) for steps in more if isinstance(steps, LazySteps)] == list(plain.actions)


@pytest.mark.parametrize("num_left", [1, 3, 8])
def test_what_is_left_of_a_pair_is_one_action(num_left: int) -> None:
    """Whichever of the two is left out."""
    plain = SCHEDULES["dualpipe"].generate(4, 8)
    with in_numbers():
        large = SCHEDULES["dualpipe"].generate(4, 8)
    for steps, row in zip(large.actions, plain.actions, strict=True):
        assert isinstance(steps, LazySteps)
        kept = [[action for action in actions_of(step) if action.micro_batch < num_left] for step in row]
        assert [list(actions_of(step)) for step in steps.before(num_left)] == [actions for actions in kept if actions]


def test_steps_are_a_sequence() -> None:
    plain = SCHEDULES["dualpipe"].generate(4, 8).actions[1]
    with in_numbers():
        steps = SCHEDULES["dualpipe"].generate(4, 8).actions[1]
    assert len(steps) == len(plain) and steps[3] == plain[3] and steps[-1] == plain[-1]
    assert tuple(steps[2:9]) == plain[2:9] and hash(steps) == hash(plain)
    with pytest.raises(IndexError):
        steps[len(plain)]


@pytest.mark.parametrize("wide", [True, False])
def test_what_is_not_legal_is_refused_as_of_actions(wide: bool) -> None:
    """One step left out, one put before what it needs, one of another rank, and ranks that wait in a circle."""
    with in_numbers(wide):
        good = SCHEDULES["zb1p"].generate(3, 4)
        rows = [steps for steps in good.actions if isinstance(steps, LazySteps)]
        first, *others = rows
        turned = LazySteps(first.codes[::-1].copy(), 3)
        for actions in ((first[1:], *others), (turned, *others), (rows[1], rows[0], rows[2])):
            bad = replace(good, actions=actions)
            assert not legal(bad)
            with pytest.raises(ScheduleError) as of_numbers:
                bad.check()
            with pytest.raises(ScheduleError) as of_actions:
                replace(bad, actions=tuple(map(tuple, actions))).check()
            assert str(of_numbers.value) == str(of_actions.value)
        rows_of_text = "F0.0 B0.0 F0.1 B0.1\nF1.1 B1.1 F1.0 B1.0\n"
        late = Schedule.from_text("# x ranks=2 micro_batches=2 placement=loop(1)\n" + rows_of_text)
        with pytest.raises(ScheduleError, match=r"rank 0, B0\.0: waits for ever") as of_actions:
            simulate(late, Costs())
        coded = [[["FBIW".index(a.kind) + 4 * (a.micro_batch * 2 + a.stage)] for a in row] for row in late.actions]
        numbers = replace(late, actions=tuple(LazySteps(np.array(row, np.int32), 2) for row in coded))
        assert numbers == late
        with pytest.raises(ScheduleError) as of_numbers:
            simulate(numbers, Costs())
        assert str(of_numbers.value) == str(of_actions.value)


def test_many_ranks_are_searched_in_seconds() -> None:
    """512 ranks with 1,024 micro-batches: legal, under the cap, and not longer than any named schedule that fits."""
    table, cap = parse_costs("FB=1.8"), 512
    begin = time.process_time()
    found = Solver(table, cap).solve(512, 1024)
    assert time.process_time() - begin < 120
    assert all(map(is_in_numbers, found.schedule.actions)) and legal(found.schedule)
    timeline = simulate(found.schedule, found.costs)
    assert timeline.makespan == found.makespan and max(timeline.peak_activations) <= (found.cap or 0)
    for row in SCHEDULES.values():
        schedule = row.generate(512, 1024)
        parts = schedule.num_stages // 512
        timeline = simulate(schedule, table.recut(512, schedule.num_stages))
        assert found.makespan <= timeline.makespan or max(timeline.peak_activations) > cap * parts
