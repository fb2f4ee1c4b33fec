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
_ONE_ROW = 0.7  # share of changes to one row alone; the others are made to the next rows, too
_GO_ON = 0.8  # and to the row after that
_NEAR = 12  # slots in which the like of a slot is looked for in the next row
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
    """Lines with a random change to one row, or the same change to some neighbouring ones; the mark to time from."""
    row, mark = int(draw() * problem.num_rows), len(timing.marks) - 1
    at = int(draw() * len(lines[row].slots))
    go_on, step = _GO_ON if draw() > _ONE_ROW else 0.0, 1 if draw() < 0.5 else -1
    candidate, draws = lines[:], _Draws(draw)
    while True:
        old = lines[row]
        new = change(old.slots, at, draws, problem.offered[row])
        line = new and changed(problem, row, old, *new)
        if not new or not line:
            return None
        candidate[row] = line
        while timing.marks[mark].at[row] > new[1]:
            mark -= 1
        other = row + step
        if draw() >= go_on or not 0 <= other < problem.num_rows:
            return candidate, mark
        places = timing.marks[mark].at
        like = _like(lines[other].slots, old.slots[at], places[other] + at - places[row])
        if like is None:
            return candidate, mark
        row, at, draws = other, like, _Draws(draw, draws)


class _Draws:
    """Draws, remembered so that a change can be made once more elsewhere."""

    def __init__(self, draw: Callable[[], float], again: _Draws | None = None) -> None:
        self.draw = draw
        self.drawn: list[float] = [] if again is None else again.drawn
        self.at = 0

    def __call__(self) -> float:
        if self.at == len(self.drawn):
            self.drawn.append(self.draw())
        self.at += 1
        return self.drawn[self.at - 1]


def _like(slots: list[int], slot: int, around: int) -> int | None:
    """The nearest place of an equal slot."""
    near = (at for far in range(_NEAR) for at in (around - far, around + far) if 0 <= at < len(slots))
    return next((at for at in near if slots[at] == slot), None)
