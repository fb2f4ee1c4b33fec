"""Starts of the search: named schedules in the problem's form, cut to its size, and greedy ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush

from compiler.ir.stage_placement import BIDIRECTIONAL, V
from compiler.schedule.dualpipe import dualpipev
from compiler.schedule.one_f_one_b import interleaved, interleaved_pairs, one_f_one_b
from compiler.schedule.schedule import Schedule
from compiler.schedule.solver.problem import (
    FIRST,
    MOST_CHUNKS,
    NOW,
    NUM_TOKENS,
    B,
    F,
    I,
    ScheduleProblem,
    Slots,
    W,
    chunk_of,
    pair,
    slot_of,
    slots_of_schedule,
    tokens_of,
)
from compiler.schedule.solver.timing import FIXED
from compiler.schedule.zero_bubble import interleaved_zb, vhalf, vmin, zb1p, zbv

# --- Greedy starts: each row takes the slot with most work per time
#
# Every seed draws other preferences for kinds of tokens, so that some seeds wait for partners and others never do.


def greedy(problem: ScheduleProblem, seed: int) -> Slots | None:
    """Legal slots under the cap, as a start; None if this seed's preferences end in a circle of waiting."""
    random_ = random.Random(seed)
    liking = _likings(random_, problem.num_chunks)
    extra = random_.choice((-1, 0, 0, 1, 2))
    limits = [_most_near(problem, row) + extra for row in range(problem.num_rows)]
    events = [-1] * problem.num_events
    events[NOW : FIRST + problem.count] = [0] * (FIRST + problem.count - NOW)
    rows = [_SeedRow(problem, row, liking, limits[row]) for row in range(problem.num_rows)]
    ready = [(0, row) for row in range(problem.num_rows)]
    asleep: list[int] = []
    while ready:
        time, row = heappop(ready)
        rows[row].clock = time
        if not rows[row].take(events):
            if not rows[row].is_done():
                asleep.append(row)
            continue
        heappush(ready, (rows[row].clock, row))
        for sleeper in asleep:
            heappush(ready, (max(time, rows[sleeper].clock), sleeper))
        asleep = []
    return None if asleep else tuple(tuple(row.slots) for row in rows)


def _most_near(problem: ScheduleProblem, row: int) -> int:
    """The number of micro-batches in flight from a row's near forward to its near backward if nothing pauses."""
    return problem.num_stages - min(stage for stage, _ in problem.homes[row])


def _likings(random_: random.Random, chunks: int) -> dict[int, float]:
    """A random factor for each token, by which its time counts as work.

    A W only fills gaps, an I defers work, and later chunks of a micro-batch are preferred.
    """
    kinds = [kind for kind in (F, B, I) for _ in range(chunks)]
    tokens = [kind + index % chunks for index, kind in enumerate(kinds)] + [W]
    likes = [random_.lognormvariate(0, 0.2) for _ in tokens]
    split, weights = random_.choice(((0.3, 0.3), (0.8, 0.4), (1.5, 0.4), (2.5, 0.3)))
    strength = {F: 1.0, B: 1.6, I: split, W: weights}
    result = {}
    for like, token in zip(likes, tokens, strict=True):
        kind, chunk = token - chunk_of(token), chunk_of(token)
        bonus = 0.2 * chunk / (chunks - 1) if chunk and kind in (F, B) else 0.0
        result[token] = like * (strength[kind] + bonus)
    return result


class _SeedRow:
    def __init__(self, problem: ScheduleProblem, row: int, liking: dict[int, float], most_near: int) -> None:
        self.problem, self.C, self.cap = problem, problem.num_chunks, problem.caps[row]
        self.most_near = max(1, min(most_near, problem.room[row] - (self.C - 1)))
        self.counts = problem.counts[row]
        self.times, self.needs, self.makes = problem.times[row], problem.needs[row], problem.makes[row]
        self.done, self.due, self.live, self.clock = [0] * (2 * self.C), 0, 0, 0
        self.slots: list[int] = []
        self.lone = [kind + chunk for kind in (F, B, I) for chunk in range(self.C)]
        self.pairs = [(slot, *tokens_of(slot)) for slot in sorted(problem.offered[row]) if slot >= NUM_TOKENS]
        self.worth = {token: liking[token] * self.times[token] for token in (*self.lone, W)}

    def is_done(self) -> bool:
        return not self.due and tuple(self.done[self.C :]) == self.counts

    def take(self, events: list[int]) -> bool:
        """Append the slot with most work per time, if any has a known start; returns whether one was appended."""
        start = {token: self._ready(token, 0, events) for token in self.lone}
        if self.due:
            start[W] = self.clock
        best, best_rate, best_start = -1, -1.0, 0
        for token, begin in start.items():
            if begin >= 0 and (token >= B or self._room() > 0):
                rate = self.worth[token] / max(1, begin - self.clock + self.times[token])  # W may take nothing
                if rate > best_rate:
                    best, best_rate, best_start = token, rate, begin
        for slot, a, b in self.pairs:
            first, second = start.get(a, -1), start.get(b, -1)
            if a == b or (B <= a < I and b == a + MOST_CHUNKS):  # two of a kind: the second is for the next micro-batch
                second = self._ready(b, 1, events) if a != W else (self.clock if self.due > 1 else -1)
            if first < 0 or second < 0 or (a < B) + (b < B) > self._room():
                continue
            begin = max(first, second)
            rate = (self.worth[a] + self.worth[b]) / max(1, begin - self.clock + self.times[slot])
            if rate > best_rate:
                best, best_rate, best_start = slot, rate, begin
        if best < 0:
            return False
        self._run(best, best_start, events)
        return True

    def _room(self) -> int:
        """The number of forwards for which there is room."""
        return (self.cap - self.live) // self.problem.activation_parts

    def _fits(self, chunk: int, ahead: int) -> bool:
        """Whether a forward leaves room for one of each later chunk, as only those can free memory again."""
        if chunk == 0 and self.done[0] - self.done[self.C] + ahead >= self.most_near:
            return False
        later = sum(self.done[later_chunk] < self.counts[later_chunk] for later_chunk in range(chunk + 1, self.C))
        return ahead < self._room() - later

    def _kind(self, token: int) -> int:
        return chunk_of(token) + (self.C if token >= B else 0)

    def _ready(self, token: int, ahead: int, events: list[int]) -> int:
        """When a token's next action, or the one `ahead` of it, can begin; -1 if unknown or not allowed."""
        kind, chunk = self._kind(token), chunk_of(token)
        k = self.done[kind] + ahead
        if token < B:
            if k >= self.counts[chunk] or not self._fits(chunk, ahead):
                return -1
        elif k >= self.done[chunk]:
            return -1
        event = events[self.needs[kind] + k]
        return max(event, self.clock) if event >= 0 else -1

    def _run(self, slot: int, begin: int, events: list[int]) -> None:
        self.slots.append(slot)
        self.clock = begin + self.times[slot]
        freed, parts, w_parts = 0, self.problem.activation_parts, self.problem.w_parts
        for token in tokens_of(slot):
            if token == W:
                self.due -= 1
                freed += w_parts
                continue
            kind = self._kind(token)
            event = self.makes[kind] + self.done[kind]
            events[event] = self.clock + self.problem.delay[event]
            self.done[kind] += 1
            self.live += parts * (token < B)
            freed += 0 if token < B else parts if token < I else parts - w_parts
            self.due += token >= I
        self.live -= freed


# --- seeds

_MOST_GREEDY, _GREEDY_SLOTS = 60, 40_000  # the most seeds, and the most slots of all seeds together


def seeds(problem: ScheduleProblem) -> Iterator[tuple[str, Slots]]:
    """Named starts. Not all of them are legal under the cap, or in this form."""
    P, N = problem.num_ranks, problem.count
    if problem.num_chunks == 1:
        for schedule in (one_f_one_b(P, N), zb1p(P, N)):
            yield schedule.name, slots_of_schedule(problem, schedule)
        yield "capped", one_f_one_b_under_cap(problem)
        if max(problem.room) > P and pair(F, B) in frozenset.intersection(*problem.offered):
            yield "paired", _one_f_one_b_in_pairs(problem)
        return
    if problem.placement not in (V, BIDIRECTIONAL):
        for make in (interleaved, interleaved_pairs, interleaved_zb):
            schedule = make(P, N, problem.num_chunks)
            yield schedule.name, slots_of_schedule(problem, schedule)
        yield "groups", slots_in_groups(problem)
        return
    half = problem.num_stages // 2
    for schedule in (dualpipev(half, max(N, 2 * half)), zbv(half, N), vhalf(half, N), vmin(half, N)):
        yield schedule.name, _both_sides(problem, schedule)


def greedy_seeds(problem: ScheduleProblem) -> Iterator[tuple[str, Slots]]:
    """Greedy starts. Many of them are equal."""
    size = 2 * problem.num_rows * problem.num_chunks * problem.count
    for seed in range(min(_MOST_GREEDY, max(1, _GREEDY_SLOTS // size))):
        slots = greedy(problem, seed)
        if slots is not None:
            yield "greedy", slots


def _both_sides(problem: ScheduleProblem, schedule: Schedule) -> Slots:
    """The slots of a V of half the ranks, cut to the problem's number of micro-batches, for all rows."""
    half = slots_of_schedule(problem, schedule)
    half = tuple(_first(row, problem.count) for row in half)
    return half if len(half) == problem.num_rows else (*half, *reversed(half))


def without_last(slots: Slots) -> Slots:
    """The slots of every rank without the last micro-batch of direction 1."""
    half = len(slots) // 2
    return tuple(_without_last(row, int(rank < half)) for rank, row in enumerate(slots))


def _without_last(row: tuple[int, ...], chunk: int) -> tuple[int, ...]:
    """The row without the last forward and backward of a chunk. Marks of slots stay.

    With a split backward, the next W goes too, so that all later W still have as many I before them.
    """
    slots = [list(tokens_of(slot % FIXED)) for slot in row]
    last = {token: index for index, tokens in enumerate(slots) for token in tokens}
    back = max((B + chunk, I + chunk), key=lambda token: last.get(token, -1))
    slots[last[F + chunk]].remove(F + chunk)
    slots[last[back]].remove(back)
    if back >= I:
        next(tokens for tokens in slots[last[back] + 1 :] if W in tokens).remove(W)
    return tuple(slot_of(tokens) + slot // FIXED * FIXED for tokens, slot in zip(slots, row, strict=True) if tokens)


def _first(row: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The row cut to the first `count` actions of each kind and chunk, with as many W as I."""
    done: Counter[int] = Counter()
    result = []
    for slot in row:
        tokens = []
        for token in tokens_of(slot):
            kind = token if token < I else token - MOST_CHUNKS
            if token < W and done[kind] < count:
                done[kind] += 1
                tokens.append(token)
                done[W] += token >= I
            elif token == W and done[W]:
                done[W] -= 1
                tokens.append(token)
        if tokens:
            result.append(slot_of(tokens))
    return tuple(result)


def one_f_one_b_under_cap(problem: ScheduleProblem) -> Slots:
    """1f1b of one chunk under any cap: a rank begins with at most as many forwards as it and earlier ranks may hold."""
    rows = []
    for rank in range(problem.num_ranks):
        warm_up = min(*problem.room[: rank + 1], problem.num_ranks - rank, problem.count) - 1
        rows.append((F,) * warm_up + (F, B) * (problem.count - warm_up) + (B,) * warm_up)
    return tuple(rows)


def slots_in_groups(problem: ScheduleProblem) -> Slots:
    """Rows under any cap: as many micro-batches as fit pass all stages and return before the next ones start."""
    limit, remaining, chunks = max(1, min(problem.room) // problem.num_chunks), problem.count, range(problem.num_chunks)
    row: list[int] = []
    while remaining:
        size = min(limit, remaining)
        row += [F + chunk for chunk in chunks for _ in range(size)]
        row += [B + chunk for chunk in reversed(chunks) for _ in range(size)]
        remaining -= size
    return (tuple(row),) * problem.num_rows


def _one_f_one_b_in_pairs(problem: ScheduleProblem) -> Slots:
    """1f1b with overlapped forwards and backwards, and more forwards before the first backward."""
    rows = []
    for rank in range(problem.num_ranks):
        warm_up = min(2 * (problem.num_ranks - rank) - 1, problem.room[rank] - 1 - rank, problem.count)
        middle = (pair(F, B),) * (problem.count - warm_up)
        rows.append((F,) * warm_up + middle + (B,) * warm_up)
    return tuple(rows)
