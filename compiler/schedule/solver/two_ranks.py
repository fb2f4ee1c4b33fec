"""The shortest schedule of two ranks: all that both can have run by some time, the earliest such time first.

A state is one of each rank (rank_states.py), and what is left of the steps that are under way. Of two ways to a state
the one that is there earlier is never worse, so each is gone on from once. Without loss, a step begins when its rank is
free or when the other rank ends a step that it waits for, and no rank pauses for as long as a W takes that is due: that
W could run there. A step is left out if the states of its rank show that all could not end in time any more.

It needs no solver. Steps are counted, not seconds, so that no clock decides what is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.numbering import numbered
from compiler.schedule.rank_states import RankStates, RankStep, SmallPipeline
from compiler.schedule.schedule import Schedule
from compiler.schedule.slots import Slot, homes
from compiler.schedule.waits import Slot as Place
from compiler.schedule.waits import Waits

_MOST_FORWARDS, _MOST_STATES, _WORK = 24, 20_000, 4_000_000
_FREE = -1  # of a rank that runs nothing, instead of its step
_Node = tuple[int, int, int, int, int, int, int]  # both ranks' state, time left and step, and which one has waited


@dataclass(frozen=True)
class ShortestSchedule:
    """The shortest schedule that is shorter than was asked for, None where none was found; no schedule takes less than
    `least`. `work` that is left."""

    schedule: Schedule | None
    least: Fraction
    work: int


def shortest_of_two(
    placement: StagePlacement,
    num_micro_batches: int,
    costs: Costs,
    caps: tuple[Fraction, ...],
    within: tuple[Fraction, Fraction],
    work: int,
) -> ShortestSchedule:
    """What is shorter than the second of the times `within`; nothing takes less than the first of them.

    `work`: states that are gone on from. Nothing is looked for where ranks are not two, messages take time, activations
    can be copied, or a rank has too many states.
    """
    waits = Waits(placement, 2, num_micro_batches, costs, caps)
    low, high = math.ceil(within[0] / waits.unit) - 1, math.ceil(within[1] / waits.unit) - 1  # none by low; high asked
    if any(waits.hop.values()) or costs.offloads or costs.micro_batches or work <= 0:
        return ShortestSchedule(None, within[0], work)
    small = SmallPipeline(waits, _WORK, _MOST_FORWARDS, _MOST_STATES)
    if len(small.ranks) < 2:
        return ShortestSchedule(None, within[0], work)
    best: Schedule | None = None
    step = 1
    while low < high and work > 0:
        # refuting takes longer the nearer an end is to the best, and finding the further it is beyond: steps begin at
        # the bound and double, but none goes beyond the middle
        end = low + min(step, max(1, (high - low) // 2))
        both = _Both.of(small, end)
        found, none = both.search(work) if both else (None, True)
        work -= both.looked_at if both else 0
        if found is not None:
            best, high, step = both.schedule(found, waits), end - 1, 1  # type: ignore[union-attr]
        elif none:
            low, step = end, 2 * step
        else:
            break
    return ShortestSchedule(best, max(within[0], (low + 1) * waits.unit), work)


@dataclass(frozen=True)
class _TimedStep:
    """A step of a rank that can be part of a schedule in time."""

    target: int
    time: int
    begin: int  # not before
    rest: int  # to the end of all, at least
    runs: tuple[tuple[int, int], ...]
    needs: frozenset[tuple[int, int]]  # of the other rank: place and number
    of: RankStep


class _Both:
    """Both ranks, with the steps that may be part of a schedule by an end."""

    def __init__(self, small: SmallPipeline, end: int, steps: list[list[_TimedStep]]) -> None:
        self.states, self.end, self.steps = [states for states, _ in small.ranks], end, steps
        self.out: list[list[list[int]]] = [[[] for _ in states.states] for states in self.states]
        for out, each in zip(self.out, steps, strict=True):
            for number, step in enumerate(each):
                out[step.of[0]].append(number)
        self.pauses = [_pauses(states, len(slots)) for states, slots in small.ranks]
        self.looked_at = 0
        self.came: dict[_Node, _Node | None] = {}

    @staticmethod
    def of(small: SmallPipeline, end: int) -> _Both | None:
        """None where the states of one rank show that nothing ends by then."""
        small.work = _WORK
        windows = small.windows(end)
        if windows is None:
            return None
        waits, heads = small.waits, windows[0]
        tails = waits.tails(waits.zeros(), windows[1])
        steps = []
        for rank, (states, slots) in enumerate(small.ranks):
            fitting = states.fitting(slots, heads, tails, end)
            if fitting is None:
                return None
            others = small.ranks[1 - rank][1]
            rows = []
            for step, begin, rest in fitting:
                needs = []
                for at, k in step[3]:
                    direction, stage = slots[at // 2]
                    wanted: Place = (direction, stage + (1 if at % 2 else -1))
                    if wanted in others:
                        needs.append((2 * others.index(wanted) + at % 2, k))
                rows.append(_TimedStep(step[1], step[2], begin, rest, step[3], frozenset(needs), step))
            steps.append(rows)
        return _Both(small, end, steps)

    def search(self, work: int) -> tuple[_Node | None, bool]:
        """The last state, and whether there is none for sure."""
        done = self.states[0].end, self.states[1].end
        begin = (0, 0, 0, 0, _FREE, _FREE, _FREE)
        heap: list[tuple[int, _Node, _Node]] = [(0, begin, begin)]
        while heap:
            now, node, before = heappop(heap)
            if node in self.came:
                continue
            if self.looked_at >= work:
                return None, False
            self.looked_at += 1
            self.came[node] = before if before != node else None
            if node[:2] == done:
                return node, False
            for later, new in self._next(now, node):
                if new not in self.came:
                    heappush(heap, (later, new, node))
        return None, True

    def _next(self, now: int, node: _Node) -> list[tuple[int, _Node]]:
        """What can follow, with its time: a rank that is free begins a step, or waits for the other one's end."""
        rank = 0 if node[2] == 0 else 1
        other = 1 - rank
        state, left = node[:2], node[2:4]
        found = []
        for number in self._startable(now, node, rank):
            step = self.steps[rank][number]
            found.append(_later(now, node, rank, step.target, step.time, number))
        allowed = self.pauses[rank][state[rank]]
        if left[other]:
            if left[other] < allowed:
                found.append((now + left[other], _ended(node, rank)))
        else:  # the other one begins a step now, and this one waits for its end
            for number in self._startable(now, node, other):
                step = self.steps[other][number]
                if step.time < allowed:
                    time, new = _later(now, node, other, step.target, step.time, number)
                    found.append((time + step.time, _ended(new, rank)))
        return found

    def _startable(self, now: int, node: _Node, rank: int) -> list[int]:
        """Steps that a rank can begin; one that has waited, only those for which it did."""
        other = 1 - rank
        state, left, under_way = node[other], node[2 + other], node[4 + other]
        counts = list(self.states[other].states[state])
        ended: frozenset[tuple[int, int]] = frozenset()
        if under_way != _FREE:
            runs = self.steps[other][under_way].runs
            if left:
                for at, k in runs:
                    counts[at] = min(counts[at], k)
            else:
                ended = frozenset(runs)
        found = []
        for number in self.out[rank][node[rank]]:
            step = self.steps[rank][number]
            if step.begin > now or now + step.rest > self.end or (node[6] == rank and not step.needs & ended):
                continue
            if all(counts[at] > k for at, k in step.needs):
                found.append(number)
        return found

    def schedule(self, last: _Node, waits: Waits) -> Schedule:
        """The schedule that ends in a state."""
        rows: list[list[RankStep]] = [[], []]
        node: _Node | None = last
        while node is not None:
            before = self.came[node]
            for rank in range(2):
                if before is not None and node[rank] != before[rank]:
                    rows[rank].append(self.steps[rank][node[4 + rank]].of)
            node = before
        slots = [_slots(waits, rank, row[::-1]) for rank, row in enumerate(rows)]
        return numbered("auto", 2, waits.num_micro_batches, waits.placement, slots.__getitem__)


def _later(now: int, node: _Node, rank: int, target: int, time: int, number: int) -> tuple[int, _Node]:
    """The time and the node at which a rank is free next, once a rank has begun a step."""
    state, left, under_way = list(node[:2]), list(node[2:4]), list(node[4:6])
    state[rank], left[rank], under_way[rank] = target, time, number
    least = min(left)
    return now + least, (*state, *(each - least for each in left), *under_way, _FREE)  # type: ignore[return-value]


def _ended(node: _Node, rank: int) -> _Node:
    """The node when the other rank has ended its step, for which this one has waited."""
    under_way = (_FREE, node[5]) if rank == 0 else (node[4], _FREE)
    return (*node[:2], 0, 0, *under_way, rank)


def _pauses(states: RankStates, num_slots: int) -> list[float]:
    """By state of a rank, a time shorter than which it may pause: that of a W that is due, if it can run alone."""
    lone: dict[int, int] = {}
    paired = False
    for _, _, time, _, choice in states.steps:
        if [kind for kind, _ in choice] == ["W"]:
            lone[choice[0][1]] = time
        paired = paired or (len(choice) == 2 and "W" in {kind for kind, _ in choice})
    if paired:  # a W may be worth more later, in a pair
        return [math.inf] * len(states.states)
    dues = [state[2 * num_slots :] for state in states.states]
    return [min((lone[w] for w, count in enumerate(due) if count), default=math.inf) for due in dues]


def _slots(waits: Waits, rank: int, row: list[RankStep]) -> list[Slot]:
    """The steps of a rank as slots: each W that of the oldest I of its weight."""
    places = waits.slots[rank]
    chunks = [(stage, direction) for stage, direction in homes(waits.placement, 2, rank)]
    weight = [waits.weights[rank].index(waits.weight(place)) for place in places]
    chunk = [chunks.index((stage, direction)) for direction, stage in places]
    due: list[list[int]] = [[] for _ in waits.weights[rank]]
    found: list[Slot] = []
    for step in row:
        slot = [("W", due[at].pop(0)) if kind == "W" else (kind, chunk[at]) for kind, at in step[4]]
        for kind, at in step[4]:
            if kind == "I":
                due[weight[at]].append(chunk[at])
        found.append(tuple(slot))  # type: ignore[arg-type]
    return found
