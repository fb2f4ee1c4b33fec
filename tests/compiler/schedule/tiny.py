"""The best makespan of tiny schedules, by trying every order: what `lower_bound` is held against."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import depends
from runtime.contract.actions import Action, Pair

Ends = dict[Action, int]


def best_makespan(
    placement: StagePlacement, num_ranks: int, num_micro_batches: int, costs: Costs, cap: Fraction | int
) -> Fraction | None:
    """The shortest makespan of all legal schedules under the cap, with pairs of any independent actions, or None."""
    search = _Search(placement, num_ranks, num_micro_batches, costs, cap)
    search.go({}, (0,) * num_ranks, 0)
    return None if search.best is None else search.best * search.unit


class _Search:
    """Actions are made once and compared by identity of value; times are whole multiples of `unit`."""

    def __init__(
        self, placement: StagePlacement, num_ranks: int, num_micro_batches: int, costs: Costs, cap: Fraction | int
    ) -> None:
        self.costs, self.cap = costs, cap
        self.holds = {"F": Fraction(1), "B": Fraction(-1), "I": costs.keeps - 1, "W": -costs.keeps}
        self.best: int | None = None
        self.last = placement.num_stages(num_ranks) - 1
        cells = [(s, m) for s in range(self.last + 1) for m in range(num_micro_batches)]
        self.cells = {cell: [Action(kind, *cell) for kind in "FBIW"] for cell in cells}
        ranks = {cell: placement.rank_of(num_ranks, num_micro_batches, *cell) for cell in cells}
        self.rank = {action: ranks[cell] for cell, row in self.cells.items() for action in row}
        # micro-batches of one direction are alike: the first stage takes them in order
        sides = [placement.direction(num_micro_batches, m) for m in range(num_micro_batches)]
        self.follows = [m > 0 and sides[m - 1] == sides[m] for m in range(num_micro_batches)]
        times = {(a,): costs.step_time(a, rank) for a, rank in self.rank.items()}
        for a, b in combinations(self.rank, 2):
            if self.rank[a] == self.rank[b] and not depends(a, b) and not depends(b, a):
                time = costs.step_time(Pair(a, b), self.rank[a])
                if time < times[a,] + times[b,]:
                    times[a, b] = time
        ranks = range(num_ranks)
        delays = (costs.message(a, b).denominator for a in ranks for b in ranks if a != b)
        self.unit = Fraction(1, 2 * math.lcm(*delays, *(t.denominator for t in times.values())))
        self.times = {step: int(time / self.unit) for step, time in times.items()}
        self.share = {a: min(t // len(step) for step, t in self.times.items() if a in step) for a in self.rank}
        self.seen: set[tuple[object, ...]] = set()

    def go(self, ends: Ends, free: tuple[int, ...], now: int) -> None:
        """Append one more step to any rank, in the order of starts; a state reached twice is gone into once."""
        if self.best is not None and max(map(sum, zip(free, self.left(ends, len(free)), strict=True))) >= self.best:
            return
        key = (frozenset(ends.items()), now)
        if key in self.seen:
            return
        self.seen.add(key)
        ready = [action for cell in self.cells for action in self.next(cell, ends)]
        if not ready:
            self.best = max(free)
        pairs = [*combinations(sorted(ready, key=str), 2), *self.entering(ready)]
        pairs = [pair if pair in self.times else pair[::-1] for pair in pairs]
        for step in [*(pair for pair in pairs if pair in self.times), *((action,) for action in ready)]:
            rank = self.rank[step[0]]
            activations = sum(self.holds[a.kind] for a in ends if self.rank[a] == rank)
            start = max(free[rank], *(self.arrival(a, ends) for a in step))
            if start >= now and activations + sum(a.kind == "F" for a in step) <= self.cap:
                end = start + self.times[step]
                self.go(ends | dict.fromkeys(step, end), (*free[:rank], end, *free[rank + 1 :]), start)

    def entering(self, ready: list[Action]) -> list[tuple[Action, Action]]:
        """Pairs of neighbouring micro-batches at the first stage: the second is ready only with the first."""
        entering = [action for action in ready if action.kind == "F" and action.stage == 0]
        after = {action: self.cells.get((0, action.micro_batch + 1)) for action in entering}
        return [(action, row[0]) for action, row in after.items() if row and self.follows[action.micro_batch + 1]]

    def left(self, ends: Ends, num_ranks: int) -> list[int]:
        """Work that each rank has still to do, at least: half of its pair is the least an action takes."""
        work = [0] * num_ranks
        for F, B, I, W in self.cells.values():
            if I in ends:
                work[self.rank[F]] += 0 if W in ends else self.share[W]
            elif B not in ends:
                work[self.rank[F]] += min(self.share[B], self.share[I] + self.share[W])
                work[self.rank[F]] += 0 if F in ends else self.share[F]
        return work

    def next(self, cell: tuple[int, int], ends: Ends) -> list[Action]:
        """The actions that a stage can run next on a micro-batch: none, its F, its B or I, or its W."""
        (stage, m), (F, B, I, W) = cell, self.cells[cell]
        if F not in ends:
            first = not self.follows[m] or self.cells[0, m - 1][0] in ends
            return [F] if (first if stage == 0 else self.cells[stage - 1, m][0] in ends) else []
        if I in ends:
            return [] if W in ends else [W]
        behind = stage == self.last or any(a in ends for a in self.cells[stage + 1, m][1:3])
        return [B, I] if B not in ends and behind else []

    def arrival(self, action: Action, ends: Ends) -> int:
        """When what comes from the neighbouring stage is there."""
        stage = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind == "W" or not 0 <= stage <= self.last:
            return 0
        row = self.cells[stage, action.micro_batch]
        source = next(a for a in (row[:1] if action.kind == "F" else row[1:3]) if a in ends)
        a, b = self.rank[source], self.rank[action]
        return ends[source] + (int(self.costs.message(a, b) / self.unit) if a != b else 0)
