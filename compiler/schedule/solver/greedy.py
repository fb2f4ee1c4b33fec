"""Seeds of the search: each row takes whatever gets most work done in the time until it is through with it.

Every seed draws its own liking for kinds of tokens, so that some wait for a partner and some never do.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

from compiler.schedule.solver.problem import FIRST, NOW, Problem
from compiler.schedule.solver.tokens import MOST_CHUNKS, NUM_TOKENS, B, F, I, Slots, W, chunk_of, tokens_of


def greedy(problem: Problem, seed: int) -> Slots | None:
    """Slots under the cap, not yet good ones; None where this seed's likings end in a circle of waiting."""
    random_ = random.Random(seed)
    liking = _likings(random_, problem.num_chunks)
    more = random_.choice((-1, 0, 0, 1, 2))
    most = [_most_near(problem, row) + more for row in range(problem.num_rows)]
    events = [-1] * problem.num_events
    events[NOW : FIRST + problem.count] = [0] * (FIRST + problem.count - NOW)
    rows = [_Row(problem, row, liking, most[row]) for row in range(problem.num_rows)]
    ready = [(0, row) for row in range(problem.num_rows)]
    asleep: list[int] = []
    while ready:
        now, row = heappop(ready)
        rows[row].now = now
        if not rows[row].take(events):
            if not rows[row].is_done():
                asleep.append(row)
            continue
        heappush(ready, (rows[row].now, row))
        for other in asleep:
            heappush(ready, (max(now, rows[other].now), other))
        asleep = []
    return None if asleep else tuple(tuple(row.slots) for row in rows)


def _most_near(problem: Problem, row: int) -> int:
    """How many micro-batches can be on their way from a row's near forward to its near backward without a pause."""
    return problem.num_stages - min(stage for stage, _ in problem.homes[row])


def _likings(random_: random.Random, chunks: int) -> dict[int, float]:
    """A factor for each token by which its time counts more. A W only fills gaps, an I puts work off; a micro-batch
    that is further on goes before."""
    kinds = [kind for kind in (F, B, I) for _ in range(chunks)]
    tokens = [kind + at % chunks for at, kind in enumerate(kinds)] + [W]
    likes = [random_.lognormvariate(0, 0.2) for _ in tokens]
    split, weights = random_.choice(((0.3, 0.3), (0.8, 0.4), (1.5, 0.4), (2.5, 0.3)))
    strength = {F: 1.0, B: 1.6, I: split, W: weights}
    result = {}
    for like, token in zip(likes, tokens, strict=True):
        kind, chunk = token - chunk_of(token), chunk_of(token)
        on = 0.2 * chunk / (chunks - 1) if chunk and kind in (F, B) else 0.0
        result[token] = like * (strength[kind] + on)
    return result


class _Row:
    def __init__(self, problem: Problem, row: int, liking: dict[int, float], most_near: int) -> None:
        self.problem, self.C, self.cap = problem, problem.num_chunks, problem.caps[row]
        self.most_near = max(1, min(most_near, problem.room[row] - (self.C - 1)))
        self.counts = problem.counts[row]
        self.times, self.needs, self.makes = problem.times[row], problem.needs[row], problem.makes[row]
        self.done, self.due, self.held, self.now = [0] * (2 * self.C), 0, 0, 0
        self.slots: list[int] = []
        self.lone = [kind + chunk for kind in (F, B, I) for chunk in range(self.C)]
        self.pairs = [(slot, *tokens_of(slot)) for slot in sorted(problem.offered[row]) if slot >= NUM_TOKENS]
        self.worth = {token: liking[token] * self.times[token] for token in (*self.lone, W)}

    def is_done(self) -> bool:
        return not self.due and tuple(self.done[self.C :]) == self.counts

    def take(self, events: list[int]) -> bool:
        """Append the slot that gets most done, if any can be begun at a time that is known."""
        start = {token: self._ready(token, 0, events) for token in self.lone}
        if self.due:
            start[W] = self.now
        best, best_rate, best_start = -1, -1.0, 0
        for token, begin in start.items():
            if begin >= 0 and (token >= B or self._room() > 0):
                rate = self.worth[token] / max(1, begin - self.now + self.times[token])  # W may take nothing
                if rate > best_rate:
                    best, best_rate, best_start = token, rate, begin
        for slot, a, b in self.pairs:
            first, second = start.get(a, -1), start.get(b, -1)
            if a == b or (B <= a < I and b == a + MOST_CHUNKS):  # two of a kind: the second needs the next micro-batch
                second = self._ready(b, 1, events) if a != W else (self.now if self.due > 1 else -1)
            if first < 0 or second < 0 or (a < B) + (b < B) > self._room():
                continue
            begin = max(first, second)
            rate = (self.worth[a] + self.worth[b]) / max(1, begin - self.now + self.times[slot])
            if rate > best_rate:
                best, best_rate, best_start = slot, rate, begin
        if best < 0:
            return False
        self._run(best, best_start, events)
        return True

    def _room(self) -> int:
        """Forwards that may begin."""
        return (self.cap - self.held) // self.problem.whole

    def _fits(self, chunk: int, ahead: int) -> bool:
        """A forward leaves room for one of each later chunk, which alone can free it again."""
        if chunk == 0 and self.done[0] - self.done[self.C] + ahead >= self.most_near:
            return False
        later = sum(self.done[other] < self.counts[other] for other in range(chunk + 1, self.C))
        return ahead < self._room() - later

    def _kind(self, token: int) -> int:
        return chunk_of(token) + (self.C if token >= B else 0)

    def _ready(self, token: int, ahead: int, events: list[int]) -> int:
        """When the next of a token, or the one after, can begin; -1 where that is not known or not allowed."""
        kind, chunk = self._kind(token), chunk_of(token)
        k = self.done[kind] + ahead
        if token < B:
            if k >= self.counts[chunk] or not self._fits(chunk, ahead):
                return -1
        elif k >= self.done[chunk]:
            return -1
        event = events[self.needs[kind] + k]
        return max(event, self.now) if event >= 0 else -1

    def _run(self, slot: int, begin: int, events: list[int]) -> None:
        self.slots.append(slot)
        self.now = begin + self.times[slot]
        freed, whole, kept = 0, self.problem.whole, self.problem.kept
        for token in tokens_of(slot):
            if token == W:
                self.due -= 1
                freed += kept
                continue
            kind = self._kind(token)
            made = self.makes[kind] + self.done[kind]
            events[made] = self.now + self.problem.delay[made]
            self.done[kind] += 1
            self.held += whole * (token < B)
            freed += 0 if token < B else whole if token < I else whole - kept
            self.due += token >= I
        self.held -= freed
