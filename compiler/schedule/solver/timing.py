"""How long rows of slots take, timed again from the first slot that a change can move.

`simulate` is the judge; this gives the same times, in whole numbers and in a fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from compiler.schedule.solver.line import Line
from compiler.schedule.solver.problem import FIRST, NOW, Problem

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
    # Of the last marks, last first, by row: from the start of the next slot to the end of all. Made where asked for.
    tails: list[list[int]] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)  # the same of what waits for an event, as of the last of these

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
    """The start of each slot of each row."""
    events = timing.marks[0].events[:]
    starts: list[list[int]] = [[] for _ in lines]
    now = [0] * len(lines)
    for row in timing.order:
        time, wait, other, makes, also = lines[row].steps[len(starts[row])]
        start = max(now[row], events[wait], events[other])
        starts[row].append(start)
        now[row] = start + time
        events[makes] = now[row] + problem.delay[makes]
        events[also] = now[row] + problem.delay[also]
    return starts


def in_time_order(problem: Problem, timing: Timing, lines: Sequence[Line]) -> Timing:
    """The timing with its slots in the order in which they start, and evenly spaced marks; no time changes."""
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
    delay, rows = problem.delay, range(len(lines))
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
            events[makes] = start + delay[makes]
            events[also] = start + delay[also]
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
            of_row = steps[row]
            while True:
                time, wait, other, makes, also = of_row[at[row]]
                ready, more = events[wait], events[other]
                if ready < 0 or more < 0:
                    break
                now[row] = max(now[row], ready, more) + time
                at[row] += 1
                events[makes] = now[row] + delay[makes]
                events[also] = now[row] + delay[also]
                order.append(row)
                left -= 1
        if left == before:
            return None
    return Timing(old.order[: mark.timed] + order, marks, now)


def is_longer(
    problem: Problem, old: Timing, lines: Sequence[Line], first: int, last: int, more: dict[int, int], limit: int
) -> bool:
    """Whether `lines` end after `limit`, or never; they are those of `old` but between the marks `first` and `last`.

    `more` has the rows that changed and how many slots they have more. Only what lies between is timed: the rest takes
    as long as it did. False means only that nobody knows. What waits for something behind the second mark is taken to
    wait for ever, as in nearly all cases it does.
    """
    begin, end = old.marks[first], old.marks[last]
    events, at, now, delay = begin.events[:], begin.at[:], begin.now[:], problem.delay
    order = old.order[begin.timed : end.timed]
    for row, count in more.items():
        order += [row] * count
        for _ in range(-count):
            order.pop(len(order) - 1 - order[::-1].index(row))
    steps = [line.steps for line in lines]
    while order:
        later = []
        for row in order:
            time, wait, other, makes, also = steps[row][at[row]]
            ready = events[wait]
            more_ready = events[other]
            if ready < 0 or more_ready < 0:
                later.append(row)
                continue
            start = now[row]
            if ready > start:
                start = ready
            if more_ready > start:
                start = more_ready
            start += time
            now[row] = start
            at[row] += 1
            events[makes] = start + delay[makes]
            events[also] = start + delay[also]
        if len(later) == len(order):
            return True
        order = later
    for row, tail in enumerate(_tails(problem, old, lines, last, more)):
        _, wait, other, _, _ = steps[row][at[row]]
        if max(now[row], events[wait], events[other]) + tail > limit:
            return True
    return False


def _tails(problem: Problem, timing: Timing, lines: Sequence[Line], mark: int, more: dict[int, int]) -> list[int]:
    """The tails of the rows at a mark; `lines` are those of the timing behind it, with so many slots more before."""
    tails, marks, delay = timing.tails, timing.marks, problem.delay
    if not tails:
        timing.behind = [-each for each in delay]  # of what nobody waits for
    behind = timing.behind
    while len(marks) - len(tails) > mark:
        at_mark = len(marks) - 1 - len(tails)
        if tails:
            end, rows = marks[at_mark + 1].timed, tails[-1][:]
            at = [place + more.get(row, 0) for row, place in enumerate(marks[at_mark + 1].at)]
        else:
            end, rows, at = len(timing.order), [0] * len(lines), [len(line.slots) for line in lines]
        for row in reversed(timing.order[marks[at_mark].timed : end]):
            at[row] -= 1
            time, wait, other, makes, also = lines[row].steps[at[row]]
            tail = rows[row]
            if behind[makes] + delay[makes] > tail:
                tail = behind[makes] + delay[makes]
            if behind[also] + delay[also] > tail:
                tail = behind[also] + delay[also]
            rows[row] = behind[wait] = behind[other] = tail + time
        tails.append(rows)
    return tails[len(marks) - 1 - mark]
