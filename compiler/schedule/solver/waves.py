"""Periods that go through the rows as a wave: all run the same slots, each a little later than the row before.

Orders of a period's slots are tried at some delays from a row to the next, so that there is a period for any number of
rows in little time. DualPipe's steady state is one of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.schedule.solver.cycle import Period, fits, kinds_of, source_of
from compiler.schedule.solver.problem import Problem
from compiler.schedule.solver.tokens import B, F, I, W, pair, tokens_of

_DELAYS = 16  # from a row to the next: so many parts of a period
_ORDERS, _LEAST, _STEPS = 1_500, 40, 4_000_000  # orders at most and at least, and slots that are placed
_Place = tuple[int, int, int, int]  # a row and kind of event, and those that it waits for

Order = tuple[int, ...]


def waves(problem: Problem) -> Iterator[Period]:
    """Periods under the cap, the shortest ones first."""
    path = _path(problem)
    tables = list({id(table): table for table in problem.times}.values())
    most = max(_LEAST, min(_ORDERS, _STEPS // (_DELAYS * len(path))))
    timed = sorted((max(sum(table[slot] for slot in order) for table in tables), order) for order in _orders(problem))
    for time, order in timed[:most]:
        for part in range(_DELAYS):
            period = _wave(problem, path, order, time, part * time // _DELAYS)
            if period is not None and fits(problem, period):
                yield period
                break


def _orders(problem: Problem) -> set[Order]:
    """Orders of one forward and one backward of each chunk, a W for each I, and of pairs that are offered.

    They begin with the first chunk's forward: where a period begins changes nothing.
    """
    offered = frozenset.intersection(*map(frozenset, problem.offered))
    chunks, draw = range(problem.num_chunks), random.Random(0)
    found: set[Order] = set()
    for split in (split for size in range(problem.num_chunks + 1) for split in combinations(chunks, size)):
        tokens = [F + chunk for chunk in chunks if chunk] + [(I if chunk in split else B) + chunk for chunk in chunks]
        tokens += [W] * len(split)
        if problem.num_chunks <= 2:
            found |= set(_all_orders((F,), tuple(sorted(tokens)), offered))
        else:
            for _ in range(_ORDERS // 2**problem.num_chunks + 1):
                draw.shuffle(tokens)
                found.add(_paired((F, *tokens), offered))
    return found


def _all_orders(begun: Order, tokens: tuple[int, ...], offered: frozenset[int]) -> Iterator[Order]:
    """Orders that go on with `begun`; its last slot may still get a partner."""
    if not tokens:
        yield begun
    for token in dict.fromkeys(tokens):
        left = list(tokens)
        left.remove(token)
        yield from _all_orders((*begun, token), tuple(left), offered)
        *before, last = begun
        if last in _LONE and pair(last, token) in offered:
            yield from _all_orders((*before, pair(last, token)), tuple(left), offered)


_LONE = frozenset(range(W + 1))


def _paired(tokens: Sequence[int], offered: frozenset[int]) -> Order:
    """The order with each token in a pair with the one behind it, where that is offered."""
    slots: list[int] = []
    for token in tokens:
        if slots and slots[-1] in _LONE and pair(slots[-1], token) in offered:
            slots[-1] = pair(slots[-1], token)
        else:
            slots.append(token)
    return tuple(slots)


def _path(problem: Problem) -> list[_Place]:
    """All kinds of events of all rows behind what they wait for; a last stage's backward waits for its forward."""
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
    for row, kind, _, _ in path:  # which grows
        path += [(*place, row, kind) for place in behind.get((row, kind), ())]
    return path


def _wave(problem: Problem, path: list[_Place], order: Order, time: int, delay: int) -> Period | None:
    """The period of rows that all run an order, each so much later than the one before it.

    Every event is as early as it can be, so that rows hold as little as they can.
    """
    mirrored = problem.placement == BIDIRECTIONAL and not problem.folded
    begins: list[dict[int, tuple[int, int]]] = []  # by row, when a kind's slot begins and ends in its period
    for row in range(problem.num_rows):
        depth = problem.num_rows - 1 - row if mirrored and row >= problem.num_rows // 2 else row
        at, kinds = depth * delay, {}
        for slot in order:
            end = at + problem.times[row][slot]
            kinds.update(dict.fromkeys(kinds_of(problem, slot), (at, end)))
            at = end
        begins.append(kinds)
    periods = [[0] * (2 * problem.num_chunks) for _ in begins]  # how many periods later than its row's first
    for row, kind, before, source in path:
        begin = begins[row][kind][0]
        ready = begin
        if before >= 0:
            ready = begins[before][source][1] + periods[before][source] * time
            ready += problem.delays[before][source] if before != row or source != kind - problem.num_chunks else 0
        periods[row][kind] = -((begin - ready) // time)
    most = max(map(max, periods))
    done = tuple(tuple(most - later for later in row) for row in periods)
    return Period(1, (order,) * problem.num_rows, done, (_due(order),) * problem.num_rows)


def _due(order: Order) -> int:
    """The fewest W that must be due when a period begins."""
    due = least = 0
    for slot in order:
        tokens = tokens_of(slot)
        due -= tokens.count(W)
        least = min(least, due)
        due += sum(I <= token < W for token in tokens)
    return -least
