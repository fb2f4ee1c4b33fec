"""Longer runs from short ones: a period of the steady state, in every row at about the same time, is repeated.

A slot has no micro-batch index, so that a period put in renumbers nothing; it has as many backwards as forwards, so
that no rank holds more. What is searched does not grow with the number of micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left

from compiler.schedule.solver.line import FIXED, line_of
from compiler.schedule.solver.problem import Problem, resized
from compiler.schedule.solver.timing import starts_of, timing_of
from compiler.schedule.solver.tokens import MOST_CHUNKS, B, F, I, Slots, W, kind_of, tokens_of

COPIES = 3  # periods that the search leaves alone: with fewer, a steady state that is too slow would not show
_LONGEST = 4  # slots of a period, for each chunk
_TRIALS = 24


def with_periods(problem: Problem, slots: Slots) -> tuple[Problem, Slots] | None:
    """The slots with a period repeated where that costs least, marked as slots to leave alone; None without one."""
    larger = resized(problem, problem.count + COPIES - 1)
    best: tuple[int, Slots] | None = None
    for place in _places(problem, slots):
        new = tuple(
            (*row[:begin], *(slot + FIXED for slot in row[begin:end] * COPIES), *row[end:])
            for row, (begin, end) in zip(slots, place, strict=True)
        )
        makespan = makespan_of(larger, new)
        if makespan is not None and (best is None or makespan < best[0]):
            best = makespan, new
    return (larger, best[1]) if best else None


def stretched(problem: Problem, slots: Slots, count: int, size: int = 1) -> Slots:
    """Slots for `count` micro-batches a chunk: the marked period is repeated for each `size` further ones."""
    rows = []
    for row in slots:
        marked = [at for at, slot in enumerate(row) if slot >= FIXED]
        begin, length = marked[0], len(marked) // COPIES
        assert marked == list(range(begin, begin + COPIES * length))
        more = row[begin : begin + length] * ((count - problem.count) // size)
        rows.append(tuple(slot % FIXED for slot in (*row[:begin], *more, *row[begin:])))
    return tuple(rows)


def makespan_of(problem: Problem, slots: Slots) -> int | None:
    """How long slots take; None where they are not legal, hold more than the cap or wait for each other for ever."""
    lines = []
    for row, each in enumerate(slots):
        line = line_of(problem, row, each)
        if line is None:
            return None
        lines.append(line)
    timing = timing_of(problem, lines)
    return None if timing is None else timing.makespan


def _places(problem: Problem, slots: Slots) -> list[list[tuple[int, int]]]:
    """Per row where a period begins and ends: those that begin at about the same time, for some times."""
    lines = [line for row, each in enumerate(slots) if (line := line_of(problem, row, each))]
    timing = timing_of(problem, lines) if len(lines) == problem.num_rows else None
    if timing is None:
        return []
    starts = starts_of(problem, timing, lines)
    places = []
    for trial in range(_TRIALS):
        time = timing.makespan * (trial + 1) // (_TRIALS + 1)
        place = [_period(problem, row, bisect_left(start, time)) for row, start in zip(slots, starts, strict=True)]
        found = [each for each in place if each]
        if len(found) == len(place) and found not in places:
            places.append(found)
    return places


def _period(problem: Problem, row: tuple[int, ...], at: int) -> tuple[int, int] | None:
    """The first slots from `at` on that are one forward and one backward of each chunk, and a W for each I."""
    C = problem.num_chunks
    once = [kind + chunk for kind in (F, B) for chunk in range(C)]
    for begin in range(at, min(at + _LONGEST * C, len(row))):
        for end in range(begin + 1, min(begin + _LONGEST * C, len(row)) + 1):
            tokens = [token for slot in row[begin:end] for token in tokens_of(slot)]
            kinds = [kind_of(token) for token in tokens]
            done = sorted(token if token < I else token - MOST_CHUNKS for token in tokens if token < W)
            if done == once and kinds.count("I") == kinds.count("W"):
                return begin, end
    return None
