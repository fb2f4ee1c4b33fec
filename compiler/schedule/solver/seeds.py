"""Where the search starts: named schedules in the problem's form, cut to its size, and greedy ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from compiler.ir.stage_placement import BIDIRECTIONAL, V
from compiler.schedule.dualpipev import dualpipev
from compiler.schedule.interleaved import interleaved
from compiler.schedule.interleaved_pairs import interleaved_pairs
from compiler.schedule.interleaved_zb import interleaved_zb
from compiler.schedule.one_f_one_b import one_f_one_b
from compiler.schedule.schedule import Schedule
from compiler.schedule.solver.greedy import greedy
from compiler.schedule.solver.line import FIXED
from compiler.schedule.solver.problem import Problem, slots_of_schedule
from compiler.schedule.solver.tokens import MOST_CHUNKS, B, F, I, Slots, W, pair, slot_of, tokens_of
from compiler.schedule.vhalf import vhalf
from compiler.schedule.vmin import vmin
from compiler.schedule.zb1p import zb1p
from compiler.schedule.zbv import zbv

_MOST_GREEDY, _GREEDY_SLOTS = 60, 40_000  # seeds, and slots of all together


def seeds(problem: Problem) -> Iterator[tuple[str, Slots]]:
    """Named starts; not all are legal under the cap, nor for the tokens' order of this form."""
    P, N = problem.num_ranks, problem.count
    if problem.num_chunks == 1:
        for schedule in (one_f_one_b(P, N), zb1p(P, N)):
            yield schedule.name, slots_of_schedule(problem, schedule)
        yield "capped", capped(problem)
        if max(problem.room) > P and pair(F, B) in frozenset.intersection(*problem.offered):
            yield "paired", _paired(problem)
        return
    if problem.placement not in (V, BIDIRECTIONAL):
        for make in (interleaved, interleaved_pairs, interleaved_zb):
            schedule = make(P, N, problem.num_chunks)
            yield schedule.name, slots_of_schedule(problem, schedule)
        yield "groups", in_groups(problem)
        return
    half = problem.num_stages // 2
    for schedule in (dualpipev(half, max(N, 2 * half)), zbv(half, N), vhalf(half, N), vmin(half, N)):
        yield schedule.name, _both_sides(problem, schedule)


def greedy_seeds(problem: Problem) -> Iterator[tuple[str, Slots]]:
    """Greedy starts, many of which are equal."""
    size = 2 * problem.num_rows * problem.num_chunks * problem.count
    for seed in range(min(_MOST_GREEDY, max(1, _GREEDY_SLOTS // size))):
        slots = greedy(problem, seed)
        if slots is not None:
            yield "greedy", slots


def _both_sides(problem: Problem, schedule: Schedule) -> Slots:
    """The slots of a V of half the ranks, of each kind and chunk as many as the problem has."""
    half = slots_of_schedule(problem, schedule)
    half = tuple(_first(row, problem.count) for row in half)
    return half if len(half) == problem.num_rows else (*half, *reversed(half))


def without_last(slots: Slots) -> Slots:
    """The slots of every rank without the last micro-batch of direction 1."""
    half = len(slots) // 2
    return tuple(_without_last(row, int(rank < half)) for rank, row in enumerate(slots))


def _without_last(row: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """The row without the last forward and backward of a chunk; marks of slots stay.

    Of a split backward the next W goes with it: all W behind it then find as many I in front of them as before.
    """
    slots = [list(tokens_of(slot % FIXED)) for slot in row]
    last = {token: at for at, tokens in enumerate(slots) for token in tokens}
    back = max((B + chunk, I + chunk), key=lambda token: last.get(token, -1))
    slots[last[F + chunk]].remove(F + chunk)
    slots[last[back]].remove(back)
    if back >= I:
        next(tokens for tokens in slots[last[back] + 1 :] if W in tokens).remove(W)
    return tuple(slot_of(left) + slot // FIXED * FIXED for left, slot in zip(slots, row, strict=True) if left)


def _first(row: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The row cut to the first `count` of each kind and chunk; there are as many W as I."""
    done: Counter[int] = Counter()
    result = []
    for slot in row:
        left = []
        for token in tokens_of(slot):
            kind = token if token < I else token - MOST_CHUNKS
            if token < W and done[kind] < count:
                done[kind] += 1
                left.append(token)
                done[W] += token >= I
            elif token == W and done[W]:
                done[W] -= 1
                left.append(token)
        if left:
            result.append(slot_of(left))
    return tuple(result)


def capped(problem: Problem) -> Slots:
    """1f1b of one chunk under any cap: a rank starts with no more forwards than it and those before it may hold."""
    rows = []
    for rank in range(problem.num_ranks):
        warm_up = min(*problem.room[: rank + 1], problem.num_ranks - rank, problem.count) - 1
        rows.append((F,) * warm_up + (F, B) * (problem.count - warm_up) + (B,) * warm_up)
    return tuple(rows)


def in_groups(problem: Problem) -> Slots:
    """Rows under any cap: as many micro-batches as fit go through all stages and back before the next ones."""
    most, rest, chunks = max(1, min(problem.room) // problem.num_chunks), problem.count, range(problem.num_chunks)
    row: list[int] = []
    while rest:
        size = min(most, rest)
        row += [F + chunk for chunk in chunks for _ in range(size)]
        row += [B + chunk for chunk in reversed(chunks) for _ in range(size)]
        rest -= size
    return (tuple(row),) * problem.num_rows


def _paired(problem: Problem) -> Slots:
    """1f1b whose forwards and backwards overlap, with as many more forwards before the first backward."""
    rows = []
    for rank in range(problem.num_ranks):
        warm_up = min(2 * (problem.num_ranks - rank) - 1, problem.room[rank] - 1 - rank, problem.count)
        middle = (pair(F, B),) * (problem.count - warm_up)
        rows.append((F,) * warm_up + middle + (B,) * warm_up)
    return tuple(rows)
