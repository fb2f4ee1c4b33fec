"""How long rows of slots take, timed again from the first slot that a change can move.

`simulate` is the judge; this gives the same times, in whole numbers and in a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from compiler.solver.line import Line
from compiler.solver.problem import FIRST, NOW, Problem

_GAP, _EVENTS = 16, 64  # slots between two marks: at least so many, and one for so many events, which are copied


@dataclass(slots=True)
class Mark:
    """The state before a slot is timed: slots timed so far, event times (-1: not yet), place and time of each row."""

    timed: int
    events: list[int]
    at: list[int]
    now: list[int]


@dataclass(slots=True)
class Timing:
    """Times of some lines, with marks to start again from.

    `order` has the row of each slot in the order in which they were timed: a slot comes after all it waits for, so
    that whatever comes before a changed slot is not moved by the change.
    """

    order: list[int]
    marks: list[Mark]
    ends: list[int]  # of the rows

    @property
    def makespan(self) -> int:
        return max(self.ends)


def timing_of(problem: Problem, lines: Sequence[Line]) -> Timing | None:
    """Times from the start; None where rows wait for each other for ever."""
    rows = range(problem.num_rows)
    events = [-1] * problem.num_events
    events[NOW : FIRST + problem.count] = [0] * (FIRST + problem.count - NOW)
    first = Timing([], [Mark(0, events, [0 for _ in rows], [0 for _ in rows])], [])
    timing = retimed(problem, first, lines, 0, None)
    return timing and in_time_order(problem, timing, lines)


def starts_of(problem: Problem, timing: Timing, lines: Sequence[Line]) -> list[list[int]]:
    """When each slot of each row starts."""
    events = timing.marks[0].events[:]
    starts: list[list[int]] = [[] for _ in lines]
    now = [0] * len(lines)
    for row in timing.order:
        time, wait, other, makes, also = lines[row].steps[len(starts[row])]
        start = max(now[row], events[wait], events[other])
        starts[row].append(start)
        now[row] = start + time
        events[makes] = events[also] = now[row] + problem.latency
    return starts


def in_time_order(problem: Problem, timing: Timing, lines: Sequence[Line]) -> Timing:
    """The same times with slots in the order in which they start, and evenly spaced marks."""
    starts = [iter(row) for row in starts_of(problem, timing, lines)]
    timed = sorted((next(starts[row]), at, row) for at, row in enumerate(timing.order))
    zero = timing.marks[0]
    marks = [Mark(at, zero.events, zero.at, zero.now) for at in range(0, len(timed), _gap(problem))]
    result = retimed(problem, Timing([row for _, _, row in timed], marks, []), lines, 0, None)
    assert result and result.ends == timing.ends
    return result


def _gap(problem: Problem) -> int:
    return max(_GAP, problem.num_events // _EVENTS)


def retimed(problem: Problem, old: Timing, lines: Sequence[Line], first: int, limit: int | None) -> Timing | None:
    """Times of `lines`, which are those of `old` up to its mark `first`.

    None where rows wait for each other for ever, or a row is sure to end after `limit`.
    """
    mark = old.marks[first]
    events, at, now = mark.events[:], mark.at[:], mark.now[:]
    latency, rows = problem.latency, range(len(lines))
    steps = [line.steps for line in lines]
    work = [line.work for line in lines]
    total = [line.work[-1] for line in lines]
    order: list[int] = []
    marks = old.marks[:first]
    bounds = [each.timed for each in old.marks[first:]] + [len(old.order)]
    for begin, end in pairwise(bounds):
        marks.append(Mark(mark.timed + len(order), events[:], at[:], now[:]))
        for row in old.order[begin:end]:
            place = at[row]
            time, wait, other, makes, also = steps[row][place]
            ready = events[wait]
            if ready < 0:
                continue
            more = events[other]
            if more < 0:
                continue
            start = now[row]
            if ready > start:
                start = ready
            if more > start:
                start = more
            start += time
            now[row] = start
            at[row] = place + 1
            events[makes] = events[also] = start + latency
            order.append(row)
        if limit is not None:
            for row in rows:
                if now[row] - work[row][at[row]] + total[row] > limit:
                    return None
    left = sum(map(len, work)) - len(lines) - sum(at)
    while left:
        before = left
        if not marks or mark.timed + len(order) - marks[-1].timed >= _gap(problem):
            marks.append(Mark(mark.timed + len(order), events[:], at[:], now[:]))
        for row in rows:
            own = steps[row]
            while True:
                time, wait, other, makes, also = own[at[row]]
                ready, more = events[wait], events[other]
                if ready < 0 or more < 0:
                    break
                now[row] = max(now[row], ready, more) + time
                at[row] += 1
                events[makes] = events[also] = now[row] + latency
                order.append(row)
                left -= 1
        if left == before:
            return None
    return Timing(old.order[: mark.timed] + order, marks, now)
