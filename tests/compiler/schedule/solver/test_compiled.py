"""The annealing of rows in C takes the same walk as the one in Python, and finds the same makespans."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.files import native
from compiler.ir.stage_placement import BIDIRECTIONAL, ONE_STAGE, StagePlacement, V, loop
from compiler.schedule.solver import compiled
from compiler.schedule.solver.cycle import makespan_in_python, makespan_of, repeat_best_period
from compiler.schedule.solver.moves import anneal, anneal_in_python
from compiler.schedule.solver.problem import F, ScheduleProblem, Slots, W, make_problem
from compiler.schedule.solver.seeds import greedy_seeds, seeds
from tests.compiler.schedule.solver.cases import costs

WORK = 15_000.0
needs_c = pytest.mark.skipif(compiled.loaded() is None, reason=f"{native.build(compiled.SOURCE)}")


@st.composite
def problems(draw: st.DrawFn) -> ScheduleProblem:
    """Problems of all placements, folded ones too, with caps that are narrow or wide."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 6]))
    placements: list[StagePlacement] = [ONE_STAGE, V, loop(2), *([BIDIRECTIONAL] if num_ranks % 2 == 0 else [])]
    placement = draw(st.sampled_from(placements))
    stages = placement.num_stages(num_ranks)
    table = draw(costs(num_ranks)).recut(num_ranks, stages)
    count = 2 * draw(st.integers(1, num_ranks + 1))
    cap = Fraction(draw(st.sampled_from([num_ranks, num_ranks + 2, 2 * num_ranks])) * stages // num_ranks)
    folded = placement == BIDIRECTIONAL and table.is_mirrored(num_ranks)
    return make_problem(placement, num_ranks, count, table, (cap,) * num_ranks, folded)


def starts(problem: ScheduleProblem) -> Iterator[tuple[ScheduleProblem, Slots]]:
    """Some rows of a problem, and those with a marked period."""
    for _, slots in (*islice(seeds(problem), 2), *islice(greedy_seeds(problem), 1)):
        yield problem, slots
        if (periodic := repeat_best_period(problem, slots)) is not None:
            yield periodic


@needs_c
@given(problems(), st.integers(0, 99))
@settings(max_examples=25)
def test_c_and_python_take_the_same_walk(problem: ScheduleProblem, seed: int) -> None:
    for larger, slots in starts(problem):
        if makespan_in_python(larger, slots) is None:
            continue
        heat, cooling = 0.2 * larger.times[0][F] * larger.num_rows, math.log(0.1) / WORK
        found = compiled.anneal(larger, slots, WORK, heat, cooling, seed, 0)
        expected = anneal_in_python(larger, slots, WORK, heat, cooling, seed, 0)
        assert found == (expected.makespan, expected.value, expected.slots)


@needs_c
@given(problems(), st.integers(0, 99))
@settings(max_examples=40)
def test_c_and_python_find_the_same_makespans(problem: ScheduleProblem, seed: int) -> None:
    """Of legal rows, and of rows with two slots exchanged or a W added, most of which are not legal."""
    draw = random.Random(seed)
    for larger, slots in starts(problem):
        damaged = [list(row) for row in slots]
        row = damaged[draw.randrange(len(damaged))]
        first, second = draw.randrange(len(row)), draw.randrange(len(row))
        row[first], row[second] = row[second], row[first]
        added = (*slots[:-1], (W, *slots[-1]))
        for tried in (slots, tuple(map(tuple, damaged)), added):
            found = compiled.makespan_of(larger, tried)
            assert (None if found == compiled.NO_MAKESPAN else found) == makespan_in_python(larger, tried)


@needs_c
@given(problems())
@settings(max_examples=5)
def test_a_walk_ends_at_its_goal(problem: ScheduleProblem) -> None:
    larger, slots = next(starts(problem))
    makespan = makespan_of(larger, slots)
    assert makespan is not None
    assert anneal(larger, slots, WORK, (0.2, 0.02), 0, goal=makespan).slots == slots


@given(problems())
@settings(max_examples=5)
def test_times_that_64_bits_cannot_hold_are_searched_in_python(problem: ScheduleProblem) -> None:
    longer = replace(
        problem,
        times=tuple({slot: time << 62 for slot, time in table.items()} for table in problem.times),
        delay=tuple(time << 62 for time in problem.delay),
    )
    _, slots = next(starts(problem))
    assert compiled.makespan_of(longer, slots) is None
    makespan = makespan_of(problem, slots)
    assert makespan_of(longer, slots) == (makespan and makespan << 62)


@given(problems())
@settings(max_examples=5)
def test_rows_are_searched_without_a_compiler(problem: ScheduleProblem) -> None:
    _, slots = next(starts(problem))
    with_c = makespan_of(problem, slots), anneal(problem, slots, WORK, (0.2, 0.02), 0, goal=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "loaded", lambda: None)
        assert (makespan_of(problem, slots), anneal(problem, slots, WORK, (0.2, 0.02), 0, goal=0)) == with_c
