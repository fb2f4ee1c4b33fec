"""Periods: the slots that every row repeats in a steady state, and whole runs made from them.

A row's period has one forward and one backward of each chunk. Rows begin it at different times. `done` gives the
micro-batches of a row's period, and so what waits for what, and how much a row holds.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.schedule.solver import compiled
from compiler.schedule.solver.problem import (
    FIRST,
    MOST_CHUNKS,
    B,
    F,
    I,
    ScheduleProblem,
    Slots,
    W,
    chunk_of,
    kind_of,
    pair,
    resize_problem,
    slot_of,
    tokens_of,
)
from compiler.schedule.solver.timing import FIXED, line_of, starts_of, timing_of

# --- Longer runs from short ones: repeat a period of the steady state, at about the same time in every row
#
# A slot has no micro-batch index, so inserting a period renumbers nothing. A period has as many backwards as forwards,
# so no rank holds more. The size of the search does not grow with the number of micro-batches.

COPIES = 3  # periods that the search leaves unchanged: with fewer, a slow steady state would not show
_LONGEST = 4  # the most slots of a period, per chunk
_TRIALS = 24


def repeat_best_period(problem: ScheduleProblem, slots: Slots) -> tuple[ScheduleProblem, Slots] | None:
    """The slots with a period repeated where that costs least, marked as fixed slots; None if there is no period."""
    larger = resize_problem(problem, problem.count + COPIES - 1)
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


def stretch_slots(problem: ScheduleProblem, slots: Slots, count: int) -> Slots:
    """Slots for `count` micro-batches per chunk: the marked period is repeated for each additional one."""
    rows = []
    for row in slots:
        marked = [index for index, slot in enumerate(row) if slot >= FIXED]
        begin, length = marked[0], len(marked) // COPIES
        assert marked == list(range(begin, begin + COPIES * length))
        repeats = row[begin : begin + length] * (count - problem.count)
        rows.append(tuple(slot % FIXED for slot in (*row[:begin], *repeats, *row[begin:])))
    return tuple(rows)


def makespan_of(problem: ScheduleProblem, slots: Slots) -> int | None:
    """The makespan of slots; None if they are illegal, exceed the cap, or wait for each other for ever."""
    makespan = compiled.makespan_of(problem, slots)
    if makespan is None:
        return makespan_in_python(problem, slots)
    return None if makespan == compiled.NO_MAKESPAN else makespan


def makespan_in_python(problem: ScheduleProblem, slots: Slots) -> int | None:
    """What `compiled` does in C, for machines without a C compiler."""
    lines = []
    for row, row_slots in enumerate(slots):
        line = line_of(problem, row, row_slots)
        if line is None:
            return None
        lines.append(line)
    timing = timing_of(problem, lines)
    return None if timing is None else timing.makespan


def _places(problem: ScheduleProblem, slots: Slots) -> list[list[tuple[int, int]]]:
    """For some times, (begin, end) by row of periods that begin at about that time."""
    lines = [line for row, row_slots in enumerate(slots) if (line := line_of(problem, row, row_slots))]
    timing = timing_of(problem, lines) if len(lines) == problem.num_rows else None
    if timing is None:
        return []
    starts = starts_of(problem, timing, lines)
    places = []
    for trial in range(_TRIALS):
        time = timing.makespan * (trial + 1) // (_TRIALS + 1)
        place = [_period(problem, row, bisect_left(start, time)) for row, start in zip(slots, starts, strict=True)]
        spans = [span for span in place if span]
        if len(spans) == len(place) and spans not in places:
            places.append(spans)
    return places


def _period(problem: ScheduleProblem, row: tuple[int, ...], first_index: int) -> tuple[int, int] | None:
    """(begin, end) of the first slots from `first_index` on with an F and a B or I per chunk, and a W for each I."""
    C = problem.num_chunks
    expected = [kind + chunk for kind in (F, B) for chunk in range(C)]
    for begin in range(first_index, min(first_index + _LONGEST * C, len(row))):
        for end in range(begin + 1, min(begin + _LONGEST * C, len(row)) + 1):
            tokens = [token for slot in row[begin:end] for token in tokens_of(slot)]
            kinds = [kind_of(token) for token in tokens]
            done = sorted(token if token < I else token - MOST_CHUNKS for token in tokens if token < W)
            if done == expected and kinds.count("I") == kinds.count("W"):
                return begin, end
    return None


# --- cycle


@dataclass(frozen=True)
class Period:
    """The slots that rows repeat."""

    rows: Slots
    done: tuple[tuple[int, ...], ...]  # by row and kind of event, how many are done when a period begins
    due: tuple[int, ...]  # by row, how many W are due when a period begins


def source_of(problem: ScheduleProblem, row: int, kind: int) -> tuple[int, int] | None:
    """The row and kind of event that a kind waits for; None if it waits for no other row."""
    event = problem.needs[row][kind] - FIRST - problem.count
    return None if event < 0 else divmod(event // problem.count, 2 * problem.num_chunks)


def kinds_of(problem: ScheduleProblem, slot: int) -> Iterator[int]:
    """The kinds of the events that a slot makes."""
    for token in tokens_of(slot):
        if token < W:
            yield chunk_of(token) + (problem.num_chunks if token >= B else 0)


def peak(problem: ScheduleProblem, period: Period, row: int) -> int | None:
    """The most parts that a row holds; None if a backward comes before its forward, or a W before its I."""
    C, done, due = problem.num_chunks, list(period.done[row]), period.due[row]
    parts, w_parts = problem.activation_parts, problem.w_parts
    live = parts * (sum(done[:C]) - sum(done[C:])) + w_parts * due
    most_parts = live
    for slot in period.rows[row]:
        tokens = tokens_of(slot)
        live += parts * sum(token < B for token in tokens)
        most_parts = max(most_parts, live)
        live -= parts * sum(B <= token < I for token in tokens) + w_parts * tokens.count(W)
        live -= (parts - w_parts) * sum(I <= token < W for token in tokens)
        due -= tokens.count(W)
        if due < 0 or any(
            token >= B and done[chunk_of(token)] <= done[C + chunk_of(token)] for token in tokens if token < W
        ):
            return None
        due += sum(I <= token < W for token in tokens)
        for kind in kinds_of(problem, slot):
            done[kind] += 1
    return most_parts


def fits(problem: ScheduleProblem, period: Period) -> bool:
    """Whether every row can run the period under its cap."""
    peaks = [peak(problem, period, row) for row in range(problem.num_rows)]
    return all(row_peak is not None and row_peak <= cap for row_peak, cap in zip(peaks, problem.caps, strict=True))


def unroll_period(problem: ScheduleProblem, period: Period) -> Slots:
    """The problem's run: the endless repetition of the period, restricted to the problem's micro-batches.

    No remaining action waits for one that is left out, and those free what they hold. So the run is legal and under the
    cap if the period is.
    """
    rows = []
    for row in range(problem.num_rows):
        slots: list[int] = []
        for window, times in _windows(problem, period, row):
            slots += window * times
        rows.append(tuple(slots))
    return tuple(rows)


def mark_periods(problem: ScheduleProblem, period: Period) -> Slots | None:
    """The problem's run with some periods marked as fixed slots; None if a row has too few whole periods."""
    rows = []
    for row in range(problem.num_rows):
        windows = [window for window, times in _windows(problem, period, row) for _ in range(times)]
        complete = [index for index, window in enumerate(windows) if window == period.rows[row]]
        if len(complete) < COPIES:
            return None
        first = complete[(len(complete) - COPIES) // 2]
        fixed = range(first, first + COPIES)
        rows.append(tuple(slot + FIXED * (index in fixed) for index, window in enumerate(windows) for slot in window))
    return tuple(rows)


def _windows(problem: ScheduleProblem, period: Period, row: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The remaining slots of each period of a row, and how many times in a row they are equal."""
    counts, before = problem.counts[row] * 2, max(period.done[row]) + 1
    done = [done - before for done in period.done[row]]
    due = (False,) * period.due[row]
    while min(number - count for number, count in zip(done, counts, strict=True)) < 0 or any(due):
        window, left_due = _window(problem, period.rows[row], done, counts, due)
        times = 1
        if left_due == due:
            times = min(_num_equal_periods(number, count) for number, count in zip(done, counts, strict=True))
        done, due = [number + times for number in done], left_due
        yield window, times


def _num_equal_periods(done: int, count: int) -> int:
    """For how many periods from here on a kind is either always or never within the run."""
    if 0 <= done < count:
        return count - done
    return -done if done < 0 else count


def _window(
    problem: ScheduleProblem,
    slots: tuple[int, ...],
    before: Sequence[int],
    counts: Sequence[int],
    due: tuple[bool, ...],
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """The slots of a period that are within the run, and for each W that is due after it, whether that W is."""
    done, left_due, window = list(before), deque(due), []
    for slot in slots:
        tokens, split = [], []
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
                tokens.append(token)
        left_due.extend(split)
        if tokens:
            window.append(slot_of(tokens))
    return tuple(window), tuple(left_due)


# --- Periods as waves: all rows run the same slots, each row a little later than the one before
#
# Orders of a period's slots are tried with some delays between rows, which quickly finds periods for any number of
# rows. DualPipe's steady state is one of them.

_DELAYS = 16  # delays that are tried, as multiples of 1 / _DELAYS of a period
_ORDERS, _LEAST, _STEPS = 1_500, 40, 4_000_000  # the most and the least orders that are tried, and the slots to place
_Place = tuple[int, int, int, int]  # row and kind of an event, and those of the event that it waits for
Order = tuple[int, ...]


def waves(problem: ScheduleProblem) -> Iterator[Period]:
    """Periods under the cap, the shortest first."""
    path = _path(problem)
    tables = list({id(table): table for table in problem.times}.values())
    limit = max(_LEAST, min(_ORDERS, _STEPS // (_DELAYS * len(path))))
    timed = sorted((max(sum(table[slot] for slot in order) for table in tables), order) for order in _orders(problem))
    for time, order in timed[:limit]:
        for part in range(_DELAYS):
            period = _wave(problem, path, order, time, part * time // _DELAYS)
            if period is not None and fits(problem, period):
                yield period
                break


def _orders(problem: ScheduleProblem) -> set[Order]:
    """Orders of one forward and one backward per chunk and a W for each I, with or without offered pairs.

    All begin with the first chunk's forward, as it does not matter where a period begins.
    """
    offered = frozenset.intersection(*map(frozenset, problem.offered))
    chunks, draw = range(problem.num_chunks), random.Random(0)
    orders: set[Order] = set()
    for split in (split for size in range(problem.num_chunks + 1) for split in combinations(chunks, size)):
        tokens = [F + chunk for chunk in chunks if chunk] + [(I if chunk in split else B) + chunk for chunk in chunks]
        tokens += [W] * len(split)
        if problem.num_chunks <= 2:
            orders |= set(_all_orders((F,), tuple(sorted(tokens)), offered))
        else:
            for _ in range(_ORDERS // 2**problem.num_chunks + 1):
                draw.shuffle(tokens)
                orders.add(_pair_tokens((F, *tokens), offered))
    return orders


def _all_orders(begun: Order, tokens: tuple[int, ...], offered: frozenset[int]) -> Iterator[Order]:
    """Orders that continue `begun`, whose last slot may still get a partner."""
    if not tokens:
        yield begun
    for token in dict.fromkeys(tokens):
        remaining = list(tokens)
        remaining.remove(token)
        yield from _all_orders((*begun, token), tuple(remaining), offered)
        *before, last = begun
        if last in _LONE and pair(last, token) in offered:
            yield from _all_orders((*before, pair(last, token)), tuple(remaining), offered)


_LONE = frozenset(range(W + 1))


def _pair_tokens(tokens: Sequence[int], offered: frozenset[int]) -> Order:
    """The order in which each token is paired with the next one if that pair is offered."""
    slots: list[int] = []
    for token in tokens:
        if slots and slots[-1] in _LONE and pair(slots[-1], token) in offered:
            slots[-1] = pair(slots[-1], token)
        else:
            slots.append(token)
    return tuple(slots)


def _path(problem: ScheduleProblem) -> list[_Place]:
    """The kinds of events of all rows, in topological order. A last stage's backward waits for its forward."""
    C = problem.num_chunks
    behind: dict[tuple[int, int], list[tuple[int, int]]] = {}
    path: list[_Place] = []
    for row in range(problem.num_rows):
        for kind in range(2 * C):
            source = source_of(problem, row, kind) or ((row, kind - C) if kind >= C else None)
            if source is None:
                path.append((row, kind, -1, -1))
            else:
                behind.setdefault(source, []).append((row, kind))
    for row, kind, _, _ in path:  # grows inside the loop
        path += [(*place, row, kind) for place in behind.get((row, kind), ())]
    return path


def _wave(problem: ScheduleProblem, path: list[_Place], order: Order, time: int, delay: int) -> Period | None:
    """The period of rows that all run an order, each `delay` later than the row before.

    Every event is as early as possible, so that rows hold as little as possible.
    """
    mirrored = problem.placement == BIDIRECTIONAL and not problem.is_folded
    begins: list[dict[int, tuple[int, int]]] = []  # by row and kind, when its slot begins and ends in the period
    for row in range(problem.num_rows):
        depth = problem.num_rows - 1 - row if mirrored and row >= problem.num_rows // 2 else row
        start, kinds = depth * delay, {}
        for slot in order:
            end = start + problem.times[row][slot]
            kinds.update(dict.fromkeys(kinds_of(problem, slot), (start, end)))
            start = end
        begins.append(kinds)
    periods = [[0] * (2 * problem.num_chunks) for _ in begins]  # by row and kind, how many periods late
    for row, kind, before, source in path:
        begin = begins[row][kind][0]
        ready = begin
        if before >= 0:
            ready = begins[before][source][1] + periods[before][source] * time
            ready += problem.delays[before][source] if before != row or source != kind - problem.num_chunks else 0
        periods[row][kind] = -((begin - ready) // time)
    latest = max(map(max, periods))
    done = tuple(tuple(latest - later for later in row) for row in periods)
    return Period((order,) * problem.num_rows, done, (_due(order),) * problem.num_rows)


def _due(order: Order) -> int:
    """The least number of W that must be due when a period begins."""
    due = least = 0
    for slot in order:
        tokens = tokens_of(slot)
        due -= tokens.count(W)
        least = min(least, due)
        due += sum(I <= token < W for token in tokens)
    return -least
