"""Simulated annealing of the rows: makespan plus the mean end of the rows, under the cap.

The second term is what makes it work: most single changes leave the makespan as it is. Most changes that are taken
leave both as they are; that is how the search walks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from compiler.solver.line import Line, changed, line_of
from compiler.solver.moves import change
from compiler.solver.problem import Problem
from compiler.solver.timing import Timing, in_time_order, retimed, timing_of
from compiler.solver.tokens import Slots

_DRAWN, _TIMED, _SLOT = 3.0, 5.0, 0.16  # microseconds of a change that is drawn, of one that is timed, for each slot
_ONE_ROW = 0.75  # share of changes to one row alone; of the others most are to two
_SORTED = 50  # changes taken between two sorts of the order in which slots are timed


@dataclass(frozen=True)
class Found:
    """Slots, how long they take, and that plus the mean end of the rows, times the number of rows."""

    makespan: int
    value: int
    slots: Slots


def anneal(problem: Problem, slots: Slots, work: float, heat: tuple[float, float], seed: int, goal: int) -> Found:
    """The best slots on a walk of `work` (in microseconds of one core, counted) from legal ones.

    It cools from the first heat to the second, in times of F, and stops at a makespan of `goal`. The same arguments
    give the same result.
    """
    draw = random.Random(seed).random
    lines = [line for row, each in enumerate(slots) if (line := line_of(problem, row, each))]
    timing = timing_of(problem, lines)
    assert timing is not None, "the start is not legal"
    value, num_rows = _value(timing), problem.num_rows
    best = Found(timing.makespan, value, slots)
    temperature, cooling = heat[0] * problem.times[0][0] * num_rows, math.log(heat[1] / heat[0]) / work
    spent, taken = 0.0, 0
    while spent < work and best.makespan > goal:
        spent += _DRAWN
        candidate = _changed(problem, lines, timing, draw)
        if candidate is None:
            continue
        spent += _TIMED + _SLOT * len(timing.order)
        allowed = -math.log(1 - draw()) * temperature * math.exp(cooling * spent)
        timed = retimed(problem, timing, candidate[0], candidate[1], timing.makespan + int(allowed / num_rows))
        if timed is None or (new := _value(timed)) - value > allowed:
            continue
        lines, timing, value, taken = candidate[0], timed, new, taken + 1
        if taken % _SORTED == 0:
            timing = in_time_order(problem, timing, lines)
        if (timing.makespan, value) < (best.makespan, best.value):
            best = Found(timing.makespan, value, tuple(tuple(line.slots) for line in lines))
    return best


def _value(timing: Timing) -> int:
    return len(timing.ends) * timing.makespan + sum(timing.ends)


def _changed(
    problem: Problem, lines: list[Line], timing: Timing, draw: Callable[[], float]
) -> tuple[list[Line], int] | None:
    """Lines with a random change to one row, or to neighbouring ones at about the same time; the mark to time from."""
    row, mark = int(draw() * problem.num_rows), len(timing.marks) - 1
    step = 1 if draw() < 0.5 else -1
    at = int(draw() * len(lines[row].slots))
    candidate = lines[:]
    while True:
        old = lines[row]
        new = change(old.slots, at, draw, problem.offered[row])
        line = new and changed(problem, row, old, *new)
        if not new or not line:
            return None
        candidate[row] = line
        while timing.marks[mark].at[row] > new[1]:
            mark -= 1
        before = timing.marks[mark].at
        other = row + step
        if draw() < _ONE_ROW or not 0 <= other < problem.num_rows:
            return candidate, mark
        at = before[other] + at - before[row] + int(draw() * 11) - 5
        if not 0 <= at < len(lines[other].slots):
            return candidate, mark
        row = other
