"""Seeds of the search: each row takes whatever gets most work done in the time until it is through with it.

Every seed draws its own liking for kinds of tokens, so that some wait for a partner and some never do.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

from compiler.solver.problem import FIRST, NOW, Problem
from compiler.solver.tokens import PAIRS, Slots, W, tokens_of


def greedy(problem: Problem, seed: int) -> Slots | None:
    """Slots under the cap, not yet good ones; None where this seed's likings end in a circle of waiting."""
    random_ = random.Random(seed)
    liking = _likings(random_)
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
    if problem.num_chunks == 1:
        return problem.num_ranks - row
    return problem.num_stages - min(row, problem.num_stages - 1 - row)


def _likings(random_: random.Random) -> list[float]:
    """A factor for each token by which its time counts more. A W only fills gaps, an I puts work off."""
    likes = [random_.lognormvariate(0, 0.2) for _ in range(7)]
    strength = (
        1.0,
        1.2,
        1.6,
        1.8,
        *random_.choice(((0.3, 0.3, 0.3), (0.8, 0.8, 0.4), (1.5, 1.5, 0.4), (2.5, 2.5, 0.3))),
    )
    return [like * strong for like, strong in zip(likes, strength, strict=True)]


class _Row:
    def __init__(self, problem: Problem, row: int, liking: list[float], most_near: int) -> None:
        self.problem, self.row = problem, row
        self.most_near = max(1, min(most_near, problem.cap - (problem.num_chunks - 1)))
        self.counts = problem.counts[row]
        self.times, self.needs, self.makes = problem.times[row], problem.needs[row], problem.makes[row]
        self.done, self.due, self.held, self.now = [0] * 4, 0, 0, 0
        self.slots: list[int] = []
        chunks = range(problem.num_chunks)
        self.lone = [token for token in range(W) if token & 1 in chunks]
        self.pairs = [(slot, *tokens_of(slot)) for slot in PAIRS if problem.offered[row][slot]]
        self.worth = [liking[token] * self.times[token] for token in range(7)]

    def is_done(self) -> bool:
        return not self.due and tuple(self.done[2:]) == self.counts

    def take(self, events: list[int]) -> bool:
        """Append the slot that gets most done, if any can be begun at a time that is known."""
        start = {token: self._ready(token, 0, events) for token in self.lone}
        if self.due:
            start[W] = self.now
        best, best_rate, best_start = -1, -1.0, 0
        for token, begin in start.items():
            if begin >= 0 and (token >= 2 or self._room() > 0):
                rate = self.worth[token] / max(1, begin - self.now + self.times[token])  # W may take nothing
                if rate > best_rate:
                    best, best_rate, best_start = token, rate, begin
        for slot, a, b in self.pairs:
            first, second = start.get(a, -1), start.get(b, -1)
            if a == b or (a in (2, 3) and b == a + 2):  # two of a kind: the second needs the next micro-batch
                second = self._ready(b, 1, events) if a != W else (self.now if self.due > 1 else -1)
            if first < 0 or second < 0 or (a < 2) + (b < 2) > self._room():
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
        return self.problem.cap - self.held

    def _near_fits(self, ahead: int) -> bool:
        """A near forward leaves room for a far one, which alone can free it again."""
        last = self.problem.num_chunks == 1 or self.done[1] == self.counts[1]
        on_way = self.done[0] - self.done[2] + ahead
        return on_way < self.most_near and self.held + ahead < self.problem.cap - (not last)

    def _ready(self, token: int, ahead: int, events: list[int]) -> int:
        """When the next of a token, or the one after, can begin; -1 where that is not known or not allowed."""
        kind = token if token < 4 else token - 2
        k = self.done[kind] + ahead
        if kind < 2:
            if k >= self.counts[kind] or (kind == 0 and not self._near_fits(ahead)):
                return -1
        elif k >= self.done[kind - 2]:
            return -1
        event = events[self.needs[kind] + k]
        return max(event, self.now) if event >= 0 else -1

    def _run(self, slot: int, begin: int, events: list[int]) -> None:
        self.slots.append(slot)
        self.now = begin + self.times[slot]
        freed = 0
        for token in tokens_of(slot):
            if token == W:
                self.due -= 1
                freed += 1
                continue
            kind = token if token < 4 else token - 2
            events[self.makes[kind] + self.done[kind]] = self.now + self.problem.latency
            self.done[kind] += 1
            self.held += token < 2
            freed += token in (2, 3)
            self.due += token in (4, 5)
        self.held -= freed
