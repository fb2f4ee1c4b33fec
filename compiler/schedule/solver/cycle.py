"""A period: what every row does again and again in a steady state, how long it takes, and whole runs made of it.

A row's period has `size` forwards and as many backwards of each chunk. Rows begin it at times of their own; `done` says
which micro-batches a row's period is of, and with it what waits for what, and how much a row holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from compiler.schedule.solver.line import FIXED
from compiler.schedule.solver.periods import COPIES
from compiler.schedule.solver.problem import FIRST, Problem
from compiler.schedule.solver.tokens import B, I, Slots, W, chunk_of, slot_of, tokens_of

_Edge = tuple[int, int, int, int]  # from a slot to a slot, the time between their starts, how many periods later


@dataclass(frozen=True)
class Period:
    """What rows repeat. `done`: by row and kind of event, how many a row has done when a period begins."""

    size: int  # micro-batches of each chunk
    rows: Slots
    done: tuple[tuple[int, ...], ...]
    due: tuple[int, ...]  # by row: W that are due when a period begins


def source_of(problem: Problem, row: int, kind: int) -> tuple[int, int] | None:
    """The row and kind of event that a kind waits for; None where it waits for no other row."""
    event = problem.needs[row][kind] - FIRST - problem.count
    return None if event < 0 else divmod(event // problem.count, 2 * problem.num_chunks)


def kinds_of(problem: Problem, slot: int) -> Iterator[int]:
    """The kinds of the events that a slot makes."""
    for token in tokens_of(slot):
        if token < W:
            yield chunk_of(token) + (problem.num_chunks if token >= B else 0)


def peak(problem: Problem, period: Period, row: int) -> int | None:
    """The most parts that a row holds; None where a backward would come before its forward, or a W before its I."""
    C, done, due = problem.num_chunks, list(period.done[row]), period.due[row]
    whole, kept = problem.whole, problem.kept
    held = whole * (sum(done[:C]) - sum(done[C:])) + kept * due
    most = held
    for slot in period.rows[row]:
        tokens = tokens_of(slot)
        held += whole * sum(token < B for token in tokens)
        most = max(most, held)
        held -= whole * sum(B <= token < I for token in tokens) + kept * tokens.count(W)
        held -= (whole - kept) * sum(I <= token < W for token in tokens)
        due -= tokens.count(W)
        if due < 0 or any(
            token >= B and done[chunk_of(token)] <= done[C + chunk_of(token)] for token in tokens if token < W
        ):
            return None
        due += sum(I <= token < W for token in tokens)
        for kind in kinds_of(problem, slot):
            done[kind] += 1
    return most


def fits(problem: Problem, period: Period) -> bool:
    """Whether every row can run it under its cap."""
    peaks = [peak(problem, period, row) for row in range(problem.num_rows)]
    return all(most is not None and most <= cap for most, cap in zip(peaks, problem.caps, strict=True))


def times_of(problem: Problem, period: Period, row: int) -> list[int]:
    """How long each slot of a row takes; a W is of the chunk of the oldest I."""
    if problem.one_w:
        return [problem.times[row][slot] for slot in period.rows[row]]
    chunks = [chunk_of(token) for slot in period.rows[row] for token in tokens_of(slot) if I <= token < W]
    times, at = [], -period.due[row]
    for slot in period.rows[row]:
        tokens = []
        for token in tokens_of(slot):
            tokens.append(W + chunks[at % len(chunks)] if token == W else token)
            at += token == W
        times.append(problem.times[row][slot_of(tokens)])
    return times


def cycle_time(problem: Problem, period: Period) -> Fraction | None:
    """The least time from a period to the next, exactly; None where rows wait for each other for ever.

    It is the most time a circle of waiting takes for each period it is later. From the longest row on, a circle that
    takes longer is looked for until there is none.
    """
    num_slots, edges = _edges(problem, period)
    least = Fraction(max(sum(times_of(problem, period, row)) for row in range(problem.num_rows)))
    while not isinstance(circle := _starts(num_slots, edges, least), _Starts):
        time, later = sum(edge[2] for edge in circle), sum(edge[3] for edge in circle)
        if later <= 0:
            return None
        least = Fraction(time, later)
    return least


def aligned(problem: Problem, period: Period) -> tuple[Period, list[list[int]], int]:
    """The period so that every slot starts from 0 to before its time, those starts by row, and the time, rounded up."""
    steady = cycle_time(problem, period)
    assert steady is not None, "rows wait for ever"
    time = math.ceil(steady)
    starts = _starts(*_edges(problem, period), Fraction(time))
    assert isinstance(starts, _Starts)
    rows, done, due, begins, first = [], [], [], [], 0
    for row, slots in enumerate(period.rows):
        own = starts.starts[first : first + len(slots)]
        first += len(slots)
        later = own[0] // time
        kept = sum(start // time == later for start in own)
        moved = [token for slot in slots[kept:] for token in tokens_of(slot)]
        ahead = [0] * len(period.done[row])
        for slot in slots[kept:]:
            for kind in kinds_of(problem, slot):
                ahead[kind] += 1
        rows.append((*slots[kept:], *slots[:kept]))
        begins.append([start % time for start in (*own[kept:], *own[:kept])])
        done.append([each - later * period.size - more for each, more in zip(period.done[row], ahead, strict=True)])
        due.append(period.due[row] - sum(I <= token < W for token in moved) + moved.count(W))
    least = min(map(min, done))
    return (
        Period(period.size, tuple(rows), tuple(tuple(each - least for each in row) for row in done), tuple(due)),
        begins,
        time,
    )


@dataclass(frozen=True)
class _Starts:
    """Starts of slots that nothing makes later."""

    starts: list[int]


def _edges(problem: Problem, period: Period) -> tuple[int, list[_Edge]]:
    """Who waits for whom: how many slots there are, and for each pair the time between the two starts."""
    places: list[list[list[int]]] = []  # by row and kind, the slots that make its events
    begin = [0]
    for slots in period.rows:
        made: list[list[int]] = [[] for _ in range(2 * problem.num_chunks)]
        for at, slot in enumerate(slots, begin[-1]):
            for kind in kinds_of(problem, slot):
                made[kind].append(at)
        places.append(made)
        begin.append(begin[-1] + len(slots))
    edges: list[_Edge] = []
    times = [times_of(problem, period, row) for row in range(problem.num_rows)]
    for row, each in enumerate(times):
        first = begin[row]
        edges += [
            (first + at, first + (at + 1) % len(each), time, int(at + 1 == len(each))) for at, time in enumerate(each)
        ]
        for kind, makers in enumerate(places[row]):
            if source := source_of(problem, row, kind):
                behind = period.done[row][kind] - period.done[source[0]][source[1]]
                for k, at in enumerate(makers):
                    periods, number = divmod(behind + k, period.size)
                    maker = places[source[0]][source[1]][number]
                    time = times[source[0]][maker - begin[source[0]]] + problem.delays[source[0]][source[1]]
                    edges.append((maker, at, time, -periods))
    return begin[-1], edges


def _starts(num_slots: int, edges: list[_Edge], time: Fraction) -> list[_Edge] | _Starts:
    """A circle of waiting that takes more than `time` for each period it is later; where there is none, starts."""
    weighed = [(edge, edge[2] * time.denominator - edge[3] * time.numerator) for edge in edges]
    out: list[list[tuple[_Edge, int]]] = [[] for _ in range(num_slots)]
    for edge, weight in weighed:
        out[edge[0]].append((edge, weight))
    start = [0] * num_slots
    last: list[_Edge | None] = [None] * num_slots
    moved = list(range(num_slots))
    while moved:
        later: dict[int, None] = {}
        for slot in moved:
            for edge, weight in out[slot]:
                if start[slot] + weight > start[edge[1]]:
                    start[edge[1]] = start[slot] + weight
                    last[edge[1]] = edge
                    later[edge[1]] = None
        moved = list(later)
        if circle := _circle(last, moved):
            return circle
    return _Starts([at // time.denominator for at in start])


def _circle(last: list[_Edge | None], slots: list[int]) -> list[_Edge] | None:
    """A circle among the edges by which slots were last moved."""
    seen: dict[int, int] = {}
    for begin in slots:
        at = begin
        while at not in seen:
            seen[at] = begin
            edge = last[at]
            if edge is None:
                break
            at = edge[0]
        else:
            if seen[at] == begin:
                circle, stop = [], at
                while True:
                    edge = last[at]
                    assert edge is not None
                    circle.append(edge)
                    at = edge[0]
                    if at == stop:
                        return circle
    return None


def unrolled(problem: Problem, period: Period) -> Slots:
    """The problem's run: the period without end, and of it all that is of its micro-batches.

    What is left out makes nobody wait and frees what it would hold, so that it is legal and under the cap where the
    period is.
    """
    rows = []
    for row in range(problem.num_rows):
        slots: list[int] = []
        for window, times in _windows(problem, period, row):
            slots += window * times
        rows.append(tuple(slots))
    return tuple(rows)


def marked(problem: Problem, period: Period) -> Slots | None:
    """The problem's run with some periods marked as slots to leave alone; None where a row has not as many."""
    rows = []
    for row in range(problem.num_rows):
        windows = [window for window, times in _windows(problem, period, row) for _ in range(times)]
        whole = [at for at, window in enumerate(windows) if window == period.rows[row]]
        if len(whole) < COPIES:
            return None
        first = whole[(len(whole) - COPIES) // 2]
        fixed = range(first, first + COPIES)
        rows.append(tuple(slot + FIXED * (at in fixed) for at, window in enumerate(windows) for slot in window))
    return tuple(rows)


def _windows(problem: Problem, period: Period, row: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """What is left of each period of a row, with how many times that is left one behind the other."""
    counts, size = problem.counts[row] * 2, period.size
    before = -(-max(period.done[row]) // size) + 1
    done = [done - before * size for done in period.done[row]]
    due = (False,) * period.due[row]
    while min(each - count for each, count in zip(done, counts, strict=True)) < 0 or any(due):
        window, left_due = _window(problem, period.rows[row], done, counts, due)
        times = 1
        if left_due == due:
            times = min(_alike(each, count, size) for each, count in zip(done, counts, strict=True))
        done, due = [each + times * size for each in done], left_due
        yield window, times


def _alike(done: int, count: int, size: int) -> int:
    """How many periods from here on have all of a kind left, or nothing of it."""
    if 0 <= done < count:
        return max(1, (count - done) // size)
    return max(1, -done // size) if done < 0 else count


def _window(
    problem: Problem, slots: tuple[int, ...], before: Sequence[int], counts: Sequence[int], due: tuple[bool, ...]
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What is left of a period; and of the W that are due behind it, which are left."""
    done, left_due, window = list(before), deque(due), []
    for slot in slots:
        left, split = [], []
        for token in tokens_of(slot):
            if token == W:
                stays = left_due.popleft()
            else:
                kind = chunk_of(token) + (problem.num_chunks if token >= B else 0)
                stays = 0 <= done[kind] < counts[kind]
                done[kind] += 1
                if token >= I:
                    split.append(stays)
            if stays:
                left.append(token)
        left_due.extend(split)
        if left:
            window.append(slot_of(left))
    return tuple(window), tuple(left_due)
