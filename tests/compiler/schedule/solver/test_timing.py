"""The search's own times equal those of `simulate`, from the start and from any mark; its rows are legal schedules."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule.costs import Costs, parse_costs
from compiler.schedule.dualpipe import dualpipe
from compiler.schedule.simulate import peak_activations, simulate
from compiler.schedule.solver.cycle import makespan_of, repeat_best_period, stretch_slots
from compiler.schedule.solver.moves import change
from compiler.schedule.solver.problem import (
    B,
    F,
    I,
    ScheduleProblem,
    Slots,
    W,
    make_problem,
    pair,
    resize_problem,
    schedule_of_slots,
    slots_of_schedule,
    tokens_of,
)
from compiler.schedule.solver.seeds import greedy
from compiler.schedule.solver.timing import (
    TimedRow,
    Timing,
    change_row,
    is_longer,
    line_of,
    retime_rows,
    starts_of,
    timing_of,
)
from tests.compiler.schedule.solver.cases import costs


def caps_of_ranks(problem: ScheduleProblem) -> list[int]:
    return [problem.caps[problem.row_of(rank)] for rank in range(problem.num_ranks)]


def judged(problem: ScheduleProblem, slots: Slots, table: Costs) -> int:
    """The makespan that `simulate` finds, of a schedule that `check` passes and the cap holds."""
    schedule = schedule_of_slots(problem, slots)
    schedule.check()
    assert all(peak <= cap for peak, cap in zip(peak_activations(schedule), caps_of_ranks(problem), strict=True))
    assert schedule.num_micro_batches == problem.num_micro_batches
    makespan = simulate(schedule, table).makespan / problem.unit
    assert makespan.denominator == 1
    return int(makespan)


@st.composite
def problems(draw: st.DrawFn) -> tuple[ScheduleProblem, Costs]:
    placement = draw(st.sampled_from([V, BIDIRECTIONAL, ONE_STAGE, loop(2), loop(3)]))
    num_ranks = 2 * draw(st.integers(1, 3)) if placement == BIDIRECTIONAL else draw(st.integers(1, 4))
    table, folded = draw(costs(placement.num_stages(num_ranks))), placement == BIDIRECTIONAL and draw(st.booleans())
    table = replace(table, ranks=() if folded else table.ranks[:num_ranks])
    if placement == V or num_ranks == 1:  # of a message that stays on its rank the search does not know
        table = replace(table, latency=Fraction(0))
    N, cap = draw(st.integers(2, 8)), st.integers(3, 7)
    caps = draw(cap | st.lists(cap, min_size=num_ranks, max_size=num_ranks))
    return make_problem(placement, num_ranks, N + N % 2 * folded, table, caps, folded), table


@settings(max_examples=80)
@given(problems(), st.integers(0, 1000))
def test_a_walk_is_timed_as_the_judge_does(case: tuple[ScheduleProblem, Costs], seed: int) -> None:
    problem, table = case
    start = greedy(problem, seed)
    if start is None:
        return
    lines = [line for row, slots in enumerate(start) if (line := line_of(problem, row, slots))]
    timing = timing_of(problem, lines)
    assert timing is not None and timing.makespan == judged(problem, start, table)
    starts = [iter(row) for row in starts_of(problem, timing, lines)]
    assert all(a <= b for a, b in pairwise([next(starts[row]) for row in timing.order])), "in the order of their starts"
    draw = random.Random(seed).random
    for _ in range(60):
        row = int(draw() * problem.num_rows)
        new = change(lines[row].slots, int(draw() * len(lines[row].slots)), draw, problem.offered[row])
        if new is None:
            continue
        slots, first, tail_length = new
        assert slots[:first] == lines[row].slots[:first]
        assert slots[len(slots) - tail_length :] == lines[row].slots[len(lines[row].slots) - tail_length :]
        line = change_row(problem, row, lines[row], slots, first, tail_length)
        fresh_line = line_of(problem, row, slots)
        assert line == fresh_line or (line and fresh_line and _same(line, fresh_line))
        if line is None:
            continue
        candidate = [*lines[:row], line, *lines[row + 1 :]]
        mark_index = max(index for index, mark in enumerate(timing.marks) if mark.positions[row] <= first)
        timed = retime_rows(problem, timing, candidate, mark_index, None)
        anew = timing_of(problem, candidate)
        assert (timed and timed.ends) == (anew and anew.ends)
        if timed is not None:
            lines, timing = candidate, timed
    assert timing.makespan == judged(problem, tuple(tuple(line.slots) for line in lines), table)


def test_changes_to_a_row_keep_its_actions() -> None:
    """Tokens move, and a B becomes an I and a later W or the other way round; each kind of change is drawn."""
    row, draw = [F, F + 1, pair(F, B), I + 1, W, pair(F + 1, I), W, B + 1], random.Random(0).random
    offered = frozenset([*range(W + 1), *(pair(F + a, back + b) for back in (B, I) for a in (0, 1) for b in (0, 1))])

    def does(slots: list[int]) -> Counter[int]:
        return Counter(token for slot in slots for token in tokens_of(slot))

    def halves(done: Counter[int]) -> Counter[int]:
        return sum((Counter([I + token - B, W] if B <= token < I else [token]) for token in done.elements()), Counter())

    row_changes = set[int]()
    for _ in range(1000):
        new = change(row, int(draw() * len(row)), draw, offered)
        if new is not None:
            done = does(new[0])
            assert halves(done) == halves(does(row)) and offered.issuperset(new[0])
            row_changes.add(done[W] - 2)
    assert row_changes == {-1, 0, 1}


@pytest.mark.parametrize("placement", [ONE_STAGE, loop(2)], ids=str)
def test_slots_start_so_that_rows_end_when_the_judge_says(placement: StagePlacement) -> None:
    """This holds for pairs as well, whose two messages both take time."""
    table = replace(parse_costs("FB=2.5"), latency=Fraction(2))
    problem = make_problem(placement, 4, 8, table, 6)
    slots = greedy(problem, 1)
    assert slots is not None
    lines = [line for row, of_row in enumerate(slots) if (line := line_of(problem, row, of_row))]
    timing = timing_of(problem, lines)
    assert timing is not None
    starts = starts_of(problem, timing, lines)
    ends = [row[-1] + line.steps[len(row) - 1][0] for row, line in zip(starts, lines, strict=True)]
    assert ends == timing.ends and max(ends) == judged(problem, slots, table)


def test_a_pair_frees_what_its_backward_frees() -> None:
    """If a W keeps nothing, an I frees the whole activation: a rank with a cap of two can continue."""
    table = replace(parse_costs("FI=1.5"), keeps=Fraction(0))
    problem = make_problem(ONE_STAGE, 1, 4, table, 2)
    pair_slot = pair(F, I)
    assert line_of(problem, 0, (F, pair_slot, pair_slot, pair_slot, I, W, W, W, W)) is not None
    assert line_of(problem, 0, (F, F, pair_slot, pair_slot, I, I, W, W, W, W)) is None, "three at once"


def test_a_seed_has_pairs_of_backwards_where_no_forward_is_left() -> None:
    """Pairs with forwards, which gain less, do not displace them."""
    problem = make_problem(ONE_STAGE, 2, 4, parse_costs("FI=1.9,IW=1"), 4)
    for seed in (2, 3, 6):  # a start in which a W waits for an I
        (first, _) = greedy(problem, seed) or ((), ())
        last_forward = max(index for index, slot in enumerate(first) if F in tokens_of(slot))
        assert pair(I, W) in first[last_forward:]


def _same(line: TimedRow, whole: TimedRow) -> bool:
    """Whether all that is read is equal: the I before a slot are counted only where the chunk of a W matters."""
    states = [[(*state[:-2], state[-1]) for state in row.states] for row in (line, whole)]
    return (line.slots, line.steps, line.work, states[0]) == (whole.slots, whole.steps, whole.work, states[1])


def _told(
    problem: ScheduleProblem, timing: Timing, lines: list[TimedRow], seed: int
) -> Iterator[tuple[list[TimedRow], float, bool]]:
    """Random legal changes of a row: lines, their makespan (infinite for a deadlock), and the answer of `is_longer`.

    Changes in which an action waits for a later one of its row are left out, as their answer is always yes.
    """
    draw = random.Random(seed).random
    for _ in range(100):
        row = int(draw() * problem.num_rows)
        old = lines[row]
        new = change(old.slots, int(draw() * len(old.slots)), draw, problem.offered[row])
        line = new and change_row(problem, row, old, *new)
        if not new or not line or (not problem.has_equal_w and line.chunks is not old.chunks):
            continue
        end = len(old.slots) - new[2]
        last = next((index for index, mark in enumerate(timing.marks) if mark.positions[row] >= end), None)
        if last is None:
            continue
        first = max(index for index, mark in enumerate(timing.marks) if mark.positions[row] <= new[1])
        candidate = [*lines[:row], line, *lines[row + 1 :]]
        anew = timing_of(problem, candidate)
        added_slots = {row: len(line.slots) - len(old.slots)}
        limit = timing.makespan
        if anew is None or not is_longer(problem, timing, candidate, first, last, added_slots, 100 * limit):
            found_longer = is_longer(problem, timing, candidate, first, last, added_slots, limit)
            yield candidate, anew.makespan if anew else math.inf, found_longer


@settings(max_examples=60)
@given(problems(), st.integers(0, 1000))
def test_candidates_detected_as_longer_are_longer(case: tuple[ScheduleProblem, Costs], seed: int) -> None:
    problem, _ = case
    start = greedy(problem, seed)
    lines = [line for row, slots in enumerate(start or ()) if (line := line_of(problem, row, slots))]
    timing = timing_of(problem, lines) if lines else None
    while timing is not None:  # walk on from each change that is no longer
        before, seed = timing.makespan, seed + 1
        better = None
        for candidate, makespan, found_longer in _told(problem, timing, lines, seed):
            assert not found_longer or makespan > before
            better = candidate if makespan < before else better
        lines, timing = better or lines, timing_of(problem, better) if better else None


def test_nearly_all_longer_candidates_are_detected_early() -> None:
    problem = make_problem(BIDIRECTIONAL, 8, 20, Costs(pairs=(("BF", Fraction(9, 5)),)), 9, folded=True)
    slots = slots_of_schedule(problem, dualpipe(8, 20))
    lines = [line for row, row_slots in enumerate(slots) if (line := line_of(problem, row, row_slots))]
    timing = timing_of(problem, lines)
    assert timing is not None
    cases = [case for seed in range(10) for case in _told(problem, timing, lines, seed)]
    longer = [found_longer for _, makespan, found_longer in cases if makespan > timing.makespan]
    assert len(longer) > 100 and sum(longer) > 0.9 * len(longer)


def test_a_limit_stops_only_longer_orders() -> None:
    problem = make_problem(BIDIRECTIONAL, 4, 8, Costs(), 5, folded=True)
    slots = slots_of_schedule(problem, dualpipe(4, 8))
    lines = [line for row, row_slots in enumerate(slots) if (line := line_of(problem, row, row_slots))]
    timing = timing_of(problem, lines)
    assert timing is not None
    assert retime_rows(problem, timing, lines, 0, timing.makespan) == timing
    assert retime_rows(problem, timing, lines, 0, timing.makespan - 1) is None


@settings(max_examples=30)
@given(problems())
def test_a_period_more_is_one_micro_batch_more_of_each_chunk(case: tuple[ScheduleProblem, Costs]) -> None:
    problem, table = case
    start = greedy(problem, 0)
    marked = start and repeat_best_period(problem, start)
    if not marked:
        return
    for count in (marked[0].count, marked[0].count + 3):
        size = resize_problem(problem, count).num_micro_batches
        longer = make_problem(
            problem.placement, problem.num_ranks, size, table, caps_of_ranks(problem), problem.is_folded
        )
        slots = stretch_slots(*marked, count)
        assert makespan_of(longer, slots) == judged(longer, slots, table)


def test_dualpipe_folds_and_unfolds() -> None:
    problem = make_problem(BIDIRECTIONAL, 8, 20, Costs(pairs=(("BF", Costs().pair_time("BF") / 2),)), 9, folded=True)
    schedule = dualpipe(8, 20)
    assert schedule_of_slots(problem, slots_of_schedule(problem, schedule)).actions == schedule.actions
