"""Rows whose W fill idle time: legal, within the cap, and with the times of the judge."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, V, loop
from compiler.schedule.costs import Costs, parse_costs
from compiler.schedule.simulate import simulate
from compiler.schedule.solver.core import _named_starts
from compiler.schedule.solver.cycle import makespan_of
from compiler.schedule.solver.filled import _bare, anneal_filled, fill_with_w, fills_pauses
from compiler.schedule.solver.problem import B, I, W, make_problem, schedule_of_slots
from compiler.schedule.solver.timing import FIXED
from tests.compiler.schedule.solver.cases import costs

TENS = parse_costs("F=10,I=10,W=10")


@settings(max_examples=40)
@given(st.data())
def test_walks_give_legal_rows_and_their_times(data: st.DataObject) -> None:
    ranks, count = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.integers(1, 9))
    placement = data.draw(st.sampled_from([V, ONE_STAGE, loop(3), *[BIDIRECTIONAL] * (ranks % 2 == 0)]))
    table = replace(data.draw(costs(ranks)), pairs=(), stages=(), ranks=())
    table = replace(table, keeps=data.draw(st.sampled_from([Fraction(1), Fraction(1), Fraction(1, 3), Fraction(0)])))
    cap = data.draw(st.integers(placement.stages_per_rank, 9))
    problem = make_problem(placement, ranks, count, table, cap)
    assert fills_pauses(problem)
    for periodic in (False, True):
        for core in _named_starts(problem, periodic, 1.0):
            walk = anneal_filled(core.problem, core.slots, 3000, (0.4, 0.04), data.draw(st.integers(0, 9)), 0)
            for slots in (walk.slots, fill_with_w(core.problem, core.slots)):
                if slots is None:
                    continue
                makespan = makespan_of(core.problem, slots)
                assert makespan is not None
                marks = [[slot for slot in row if slot >= FIXED] for row in core.slots]
                assert [[slot for slot in row if slot >= FIXED] for row in slots] == marks
                plain = tuple(tuple(slot % FIXED for slot in row) for row in slots)
                schedule = schedule_of_slots(core.problem, plain)
                schedule.check()
                timeline = simulate(schedule, table)
                assert max(timeline.peak_activations) <= cap
                if not table.latency:  # the judge hands over to the same rank at once
                    assert timeline.makespan == makespan * core.problem.unit
            assert walk.makespan == makespan_of(core.problem, walk.slots)


def test_pauses_are_filled() -> None:
    """V-Half takes 840, and 815 where its W run in its pauses."""
    problem = make_problem(V, 8, 24, TENS.recut(8, 16), 10)
    start = next(iter(_named_starts(problem, False, 1.0)))
    slots = fill_with_w(problem, start.slots)
    assert slots is not None and [makespan_of(problem, rows) for rows in (start.slots, slots)] == [840, 815]
    assert all(row.count(W) == 48 for row in slots)


def early(slots: tuple[int, ...]) -> int:
    """The W before the first marked slot, separate or within a B."""
    row = slots[: next(index for index, slot in enumerate(slots) if slot >= FIXED)]
    return row.count(W) + sum(B <= slot < I for slot in row)


def test_before_a_period_as_many_w_run_as_did() -> None:
    """The slots of a period are marked; each copy of it begins with the activations that the previous one leaves."""
    problem = make_problem(V, 4, 24, TENS.recut(4, 8), 7)
    cores = [core for core in _named_starts(problem, True, 1.0) if all(max(row) >= FIXED for row in core.slots)]
    fillings = [(core.slots, slots) for core in cores if (slots := fill_with_w(core.problem, core.slots))]
    assert any(early(row) for slots, _ in fillings for row in slots)
    for before, after in fillings:
        assert [*map(early, after)] == [*map(early, before)]


@pytest.mark.parametrize("periodic", [False, True])
def test_no_w_is_lost_where_rows_are_without(periodic: bool) -> None:
    """The numbers of W to run before the marked slots, and after the first of them, equal those that did run."""
    problem = make_problem(V, 4, 24, TENS.recut(4, 8), 7)
    for core in _named_starts(problem, periodic, 1.0):
        bare = _bare(core.problem, core.slots)
        for row, bare_row, spare in zip(core.slots, bare.rows, bare.spare, strict=True):
            num_w = sum(slot == W or B <= slot < I for slot in row)
            before = early(row) if periodic else num_w
            assert W not in bare_row and spare == (before, num_w - before)


def test_a_short_walk_is_nearly_as_good_as_a_long_search() -> None:
    """The search begins with 380 and ends with 310 after some seconds."""
    problem = make_problem(ONE_STAGE, 4, 8, TENS, 3)
    start = next(iter(_named_starts(problem, False, 1.0)))
    before = fill_with_w(problem, start.slots)
    assert before is not None and makespan_of(problem, before) == 380
    makespans = [anneal_filled(problem, start.slots, 20_000, (0.4, 0.04), seed, 0).makespan for seed in range(4)]
    assert min(makespans) == 310 and max(makespans) <= 320


@pytest.mark.parametrize("text", ["F=1,I=1,W=1,FB=1.8", "FI=1.5", "WW=1.5"])
def test_where_a_pair_gains_w_are_searched_like_all_else(text: str) -> None:
    assert fills_pauses(make_problem(V, 2, 4, Costs(), 4))
    assert not fills_pauses(make_problem(V, 2, 4, parse_costs(text), 4))
    uneven = parse_costs("F=1")
    assert not fills_pauses(make_problem(V, 2, 4, replace(uneven, stages=(1, 1, 1, 2)), 4))  # type: ignore[arg-type]
