"""Where the search starts: named schedules in the problem's form, cut to its size, and greedy ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from compiler.schedules.dualpipev import dualpipev
from compiler.schedules.one_f_one_b import one_f_one_b
from compiler.schedules.schedule import Schedule
from compiler.schedules.zb1p import zb1p
from compiler.schedules.zbv import zbv
from compiler.solver.greedy import greedy
from compiler.solver.problem import Problem, slots_of_schedule
from compiler.solver.tokens import B0, F0, KIND, Slots, slot_of, tokens_of

NUM_GREEDY = 150


def seeds(problem: Problem) -> Iterator[tuple[str, Slots]]:
    """Named starts; not all are legal under the cap, nor for the tokens' order of this form."""
    P, N = problem.num_ranks, problem.count
    if problem.form == "chain":
        for schedule in (one_f_one_b(P, N), zb1p(P, N)):
            yield schedule.name, slots_of_schedule(problem, schedule)
        yield "1f1b", capped(problem)
        return
    for name, schedule in (("dualpipe", dualpipev(P // 2, max(N, P))), ("zbv", zbv(P // 2, N))):
        yield name, _both_sides(problem, schedule)


def greedy_seeds(problem: Problem) -> Iterator[tuple[str, Slots]]:
    """Greedy ones, of which many are alike."""
    for seed in range(NUM_GREEDY):
        slots = greedy(problem, seed)
        if slots is not None:
            yield "greedy", slots


def _both_sides(problem: Problem, schedule: Schedule) -> Slots:
    """The slots of a V of half the ranks, of each kind and chunk as many as the problem has."""
    half = slots_of_schedule(problem, schedule)
    half = tuple(_first(row, problem.count) for row in half)
    return half if problem.form == "folded" else (*half, *reversed(half))


def _first(row: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Without what comes after the first `count` of a kind and chunk; W keeps to the number of I."""
    done: Counter[int] = Counter()
    result = []
    for slot in row:
        kept = []
        for token in tokens_of(slot):
            kind = token if token < 4 else token - 2
            if token < 6 and done[kind] < count:
                done[kind] += 1
                kept.append(token)
                done[4] += KIND[token] == "I"
            elif token == 6 and done[4]:
                done[4] -= 1
                kept.append(token)
        if kept:
            result.append(slot_of(kept))
    return tuple(result)


def capped(problem: Problem) -> Slots:
    """1f1b of a chain under any cap: a rank starts with no more forwards than it may hold."""
    rows = []
    for rank in range(problem.num_ranks):
        warm_up = min(problem.cap, problem.num_ranks - rank, problem.count) - 1
        rows.append((F0,) * warm_up + (F0, B0) * (problem.count - warm_up) + (B0,) * warm_up)
    return tuple(rows)
