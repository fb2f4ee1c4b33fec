"""A lower bound on the makespan of every schedule of a placement, under a cap on activations.

Per rank, its steps fall into four phases, by events that every schedule has:

    fill | 1: only F | first B or I … | 2: anything | … last F | 3: no F | last B or I … | 4: only W

The first step cannot start before `head` of its F, nor phase 2 before that of the first B or I; behind the last F and
behind the last B or I the rest of their micro-batch's way is still to go. How often each kind of step is run in each
phase is relaxed to real numbers: a linear program, whose least makespan no schedule of the rank can beat. The bound is
the largest of the ranks'. It holds for any table of pairs, uneven stages and ranks, and latency, and it knows that
nothing pairs with a forward before the first or behind the last one: that is what filling and draining cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, reduce
from itertools import combinations_with_replacement

from compiler.schedules.costs import Costs
from compiler.schedules.linear_program import Row, least
from compiler.stage_placement import StagePlacement
from runtime.actions import KINDS, Action, ActionKind, Pair

# With more different weights on one rank, they are left out of the program (`shares`).
_MOST_WEIGHTS = 3
_MOST_RANKS = 64  # of so many different ones the program is solved, which takes some ms each
_PHASE_KINDS: dict[int, tuple[ActionKind, ...]] = {1: ("F",), 2: KINDS, 3: ("B", "I", "W"), 4: ("W",)}
_Item = tuple[ActionKind, int]  # an action of a step: its kind, and which of the weights


def lower_bound(
    placement: StagePlacement, num_ranks: int, num_micro_batches: int, costs: Costs, cap: int | None = None
) -> Fraction:
    """No schedule of these sizes on this placement ends sooner, if no rank holds more than `cap` activations.

    ValueError where the placement or the weights do not fit the sizes. In the unit of the costs.
    """
    costs.check(num_ranks, placement.num_stages(num_ranks))
    ends = {placement.direction(num_micro_batches, m): m for m in (num_micro_batches - 1, 0)}
    paths = [_Path.of(placement, num_ranks, num_micro_batches, costs, m) for m in ends.values()]
    best = max(path.head_backward[0] + path.last for path in paths)  # one micro-batch, there and back
    ranks = {_Rank.of(paths, rank, costs, cap): None for rank in range(num_ranks)}  # mirrored ones are alike
    fullest = sorted(ranks, key=lambda rank: rank.fill + rank.shares(costs), reverse=True)[:_MOST_RANKS]
    return max([best, *(rank.bound(costs) for rank in fullest)])


@dataclass(frozen=True)
class _Path:
    """The way of a micro-batch through the stages, each action at the least it can take; all by stage."""

    ranks: tuple[int, ...]
    count: int  # micro-batches that go this way
    head_forward: tuple[Fraction, ...]  # an F cannot start before
    head_backward: tuple[Fraction, ...]  # neither can a B or an I
    tail_forward: tuple[Fraction, ...]  # behind the end of an F there is at least this to come
    tail_backward: tuple[Fraction, ...]  # behind the end of a B or an I
    last: Fraction  # the backward of stage 0, whole

    @staticmethod
    def of(placement: StagePlacement, num_ranks: int, num_micro_batches: int, costs: Costs, micro_batch: int) -> _Path:
        held_by = [placement.stages_of(num_ranks, rank) for rank in range(num_ranks)]
        side = placement.direction(num_micro_batches, micro_batch)
        count = sum(placement.direction(num_micro_batches, m) == side for m in range(num_micro_batches))
        stages = range(placement.num_stages(num_ranks))
        ranks = tuple(placement.rank_of(num_ranks, num_micro_batches, stage, micro_batch) for stage in stages)
        hops = [costs.latency * (ranks[stage] != ranks[stage + 1]) for stage in stages[:-1]]
        alike = [{costs.weight(stage, rank): stage for stage in each} for rank, each in enumerate(held_by)]

        @cache
        def quickest(kind: ActionKind, stage: int, rank: int) -> Fraction:
            return _quickest(costs, kind, stage, rank, tuple(alike[rank].values()))

        forward, whole, backward, deferred = (
            [quickest(kind, alike[rank][costs.weight(stage, rank)], rank) for stage, rank in enumerate(ranks)]
            for kind in KINDS
        )
        backward = [min(one) for one in zip(whole, backward, strict=True)]
        last = min(whole[0], backward[0] + deferred[0])
        head = [Fraction(0)]
        for stage in stages[:-1]:
            head.append(head[-1] + forward[stage] + hops[stage])
        turn = head[-1] + forward[-1]
        back = [turn]
        for stage in reversed(stages[:-1]):
            back.append(back[-1] + backward[stage + 1] + hops[stage])
        back.reverse()
        end = back[0] + last
        tail = [Fraction(0), *(end - back[stage] - backward[stage] for stage in stages[1:])]
        ahead = tuple(end - head[stage] - forward[stage] for stage in stages)
        return _Path(ranks, count, tuple(head), tuple(back), ahead, tuple(tail), last)


def _quickest(costs: Costs, kind: ActionKind, stage: int, rank: int, held: Sequence[int]) -> Fraction:
    """The least time of a step that has this action: alone, or in a pair with what the rank holds."""
    action = Action(kind, stage, 0)
    others = (Action(each, other, 1) for each in KINDS for other in held)
    return min(costs.of(action, rank), *(costs.of(Pair(action, other), rank) for other in others))


@dataclass(frozen=True)
class _Rank:
    """What the bound of one rank depends on."""

    amounts: tuple[tuple[Fraction, int], ...]  # (weight, micro-batches of the stages of that weight)
    fill: Fraction
    first_backward: Fraction
    tail_forward: Fraction
    tail_backward: Fraction
    cap: int | None

    @staticmethod
    def of(paths: Sequence[_Path], rank: int, costs: Costs, cap: int | None) -> _Rank:
        here = [(path, stage) for path in paths for stage, each in enumerate(path.ranks) if each == rank]
        amounts: Counter[Fraction] = Counter()
        for path, stage in here:
            amounts[costs.weight(stage, rank)] += path.count
        return _Rank(
            tuple(sorted(amounts.items())),
            min((path.head_forward[stage] for path, stage in here), default=Fraction(0)),
            min((path.head_backward[stage] for path, stage in here), default=Fraction(0)),
            min((path.tail_forward[stage] for path, stage in here), default=Fraction(0)),
            min((path.tail_backward[stage] for path, stage in here), default=Fraction(0)),
            cap,
        )

    def bound(self, costs: Costs) -> Fraction:
        """The least time by which the rank has run its steps, and the other ranks what depends on them."""
        if not self.amounts:
            return Fraction(0)
        if len(self.amounts) > _MOST_WEIGHTS:
            return self.fill + self.shares(costs)
        in_turn = _Program(self, costs, overlaps=True).least()
        one_by_one = _Program(self, costs, overlaps=False).least()
        return self.fill + min(time for time in (in_turn, one_by_one) if time is not None)

    def shares(self, costs: Costs) -> Fraction:
        """All work, every action at the best share of its time that a pair gives it."""
        best = {kind: min(Fraction(1), *(_share(costs, kind, other) for other in KINDS)) for kind in KINDS}
        time = {kind: best[kind] * costs.one(kind) for kind in KINDS}
        return (time["F"] + min(time["B"], time["I"] + time["W"])) * sum(weight * n for weight, n in self.amounts)


def _share(costs: Costs, kind: str, other: str) -> Fraction:
    both = costs.one(kind) + costs.one(other)
    return costs.two(kind + other) / both if both else Fraction(1)


class _Program:
    """The linear program of a rank, from its fill on: how often each step is run in each phase, and how long they are.

    `overlaps`: the first backward starts before the last forward ends. If not, all forwards are in phase 1, phase 2 is
    empty, and phase 3 begins with the first backward.
    """

    def __init__(self, rank: _Rank, costs: Costs, overlaps: bool) -> None:
        self.rank, self.overlaps = rank, overlaps
        self.lengths = {phase: k for k, phase in enumerate((1, 2, 3, 4))}  # the variables 0 to 3
        self.steps: list[tuple[int, tuple[_Item, ...], Fraction]] = [
            (phase, items, time)
            for phase, kinds in _PHASE_KINDS.items()
            if overlaps or phase != 2
            for items, time in _steps(kinds, rank.amounts, costs)
        ]

    def least(self) -> Fraction | None:
        """The least time; None where the cap leaves no such schedule."""
        prices = [Fraction(1)] * 4 + [Fraction(0)] * len(self.steps)
        return least(prices, [*self._amounts(), *self._memory(), *self._times()])

    def _amounts(self) -> Iterator[Row]:
        """Every micro-batch runs F, then B or I … W, once; an I of phase 3 has its W there or behind."""
        for k, (_, amount) in enumerate(self.rank.amounts):
            forwards, backwards = self._count("F", k), self._count("BI", k)
            deferred = _sum(self._count("W", k), self._count("I", k), -1)
            for row, count in ((forwards, amount), (backwards, amount), (deferred, 0)):
                yield row, Fraction(count)
                yield _sum({}, row, -1), Fraction(-count)
            yield _sum(self._count("W", k, (3, 4)), self._count("I", k, (3,)), -1), Fraction(0)

    def _memory(self) -> Iterator[Row]:
        """What is held when the first backward starts, and when the last forward ends."""
        if self.rank.cap is not None:
            every = range(len(self.rank.amounts))
            started = [self._count("F", k, (1,)) for k in every]
            released = [self._count("BW", k, (3, 4)) for k in every]
            for rows in (started, released):
                yield reduce(lambda all, row: _sum(all, row, -1), rows, {}), Fraction(-self.rank.cap)

    def _times(self) -> Iterator[Row]:
        """How long each phase is at least."""
        rank, length = self.rank, self.lengths
        for phase, variable in length.items():
            yield _sum({variable: Fraction(1)}, self._work(phase), -1), Fraction(0)
        yield {length[1]: Fraction(1)}, rank.first_backward - rank.fill
        yield {length[4]: Fraction(1)}, rank.tail_backward
        behind = {length[3]: Fraction(1), length[4]: Fraction(1)}  # the last forward
        if not self.overlaps:  # it may end long before phase 1 does
            behind = _sum(behind | {length[1]: Fraction(1)}, self._work(1), -1)
        yield behind, rank.tail_forward

    def _count(self, kinds: str, weight: int, phases: tuple[int, ...] = (1, 2, 3, 4)) -> dict[int, Fraction]:
        """How many actions of some kinds and one weight are run in some phases, as a sum over the steps."""
        counts = {}
        for j, (phase, items, _) in enumerate(self.steps, 4):
            if phase in phases and (count := sum(kind in kinds and k == weight for kind, k in items)):
                counts[j] = Fraction(count)
        return counts

    def _work(self, phase: int) -> dict[int, Fraction]:
        return {j: time for j, (each, _, time) in enumerate(self.steps, 4) if each == phase}


def _steps(
    kinds: Sequence[ActionKind], amounts: Sequence[tuple[Fraction, int]], costs: Costs
) -> Iterator[tuple[tuple[_Item, ...], Fraction]]:
    """The lone actions of some kinds and all weights, and the pairs that gain, with their times."""
    one = [(kind, k) for kind in kinds for k in range(len(amounts))]
    weights = replace(costs, stages=tuple(weight for weight, _ in amounts), ranks=())
    for item in one:
        yield (item,), weights.of(Action(item[0], item[1], 0), 0)
    for pair in combinations_with_replacement(one, 2):
        first, second = (Action(kind, k, m) for m, (kind, k) in enumerate(pair))
        time = weights.of(Pair(first, second), 0)
        if time < weights.of(first, 0) + weights.of(second, 0):
            yield pair, time


def _sum(row: dict[int, Fraction], other: dict[int, Fraction], sign: int) -> dict[int, Fraction]:
    return row | {j: row.get(j, Fraction(0)) + sign * value for j, value in other.items()}
