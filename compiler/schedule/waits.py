"""The waits in a pipeline: the earliest start of every action, and the least time from it to the end of all actions.

Micro-batches are alike, so every stage can take those of a direction in order: number them by their starts on each
stage, and the schedule stays legal and as long as it was. With these numbers, an action waits

- for the previous stage (a forward) or the next stage (a backward), and for the message from there;
- for the previous micro-batch on its own stage, unless a pair can run both;
- a forward also waits for backwards that must come first because of the cap. A rank holds the stages s1 < … < sv of a
  direction. Until micro-batch j returns from su, it holds the activations of s1 to su, and each later micro-batch that
  has started si holds those of s1 to s_min(i, u), as backwards are in order too. So the forward of si on micro-batch
  j + lag waits for j if lag · min(i, u) + u > cap: otherwise j could never start su. It waits until the first release,
  which comes some time after the start of the backward of su on j, as a W may have to run first if an I frees nothing.

The longest path of waits is a lower bound. It contains a relation of memory and time: under a cap of c on `loop(1)`, a
micro-batch starts when the c-th one before it has been to the last stage and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.weights import Weight
from runtime.contract.actions import KINDS, Action, ActionKind, Pair

Slot = tuple[int, int]  # a direction and a stage
Item = tuple[ActionKind, int]  # an action of a step: its kind, and the index of its weight on the rank
TimedSteps = tuple[tuple[tuple[Item, ...], Fraction], ...]  # one or two items, and the time of their step
Times = dict[tuple[str, Slot], list[int]]  # ("F", or "B" for B and I, slot) → a time for each micro-batch


@dataclass(frozen=True)
class Waits:
    """A pipeline with each action at the least time it can take. Times are whole multiples of `unit`."""

    placement: StagePlacement
    num_ranks: int
    num_micro_batches: int
    costs: Costs
    caps: tuple[Fraction | int, ...] | None  # activations that each rank may hold

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of micro-batches of each direction that has any."""
        first = min(self.placement.turn(self.num_micro_batches), self.num_micro_batches)
        return tuple(count for count in (first, self.num_micro_batches - first) if count)

    @cached_property
    def last(self) -> int:
        """The last stage."""
        return self.placement.num_stages(self.num_ranks) - 1

    @cached_property
    def rank(self) -> dict[Slot, int]:
        """Slot → rank, in the order in which a micro-batch goes through them."""
        P, N = self.num_ranks, self.num_micro_batches
        firsts = {direction: direction * (N - 1) for direction in range(len(self.counts))}
        return {(d, s): self.placement.rank_of(P, N, s, m) for d, m in firsts.items() for s in range(self.last + 1)}

    @cached_property
    def slots(self) -> list[list[Slot]]:
        """The slots of each rank."""
        slots: list[list[Slot]] = [[] for _ in range(self.num_ranks)]
        for slot, rank in self.rank.items():
            slots[rank].append(slot)
        return slots

    def weight(self, slot: Slot) -> Weight:
        """The factors of the costs of a slot's actions."""
        return self.costs.weight(slot[1], self.rank[slot])

    @cached_property
    def weights(self) -> list[list[Weight]]:
        """The distinct weights of each rank's slots."""
        return [sorted({self.weight(slot) for slot in slots}) for slots in self.slots]

    @cached_property
    def steps_by_weights(self) -> dict[tuple[Weight, ...], TimedSteps]:
        """By the distinct weights of a rank's slots, its lone actions and its pairs that gain."""
        return {weights: steps_of(weights, self.costs) for weights in dict.fromkeys(map(tuple, self.weights))}

    @cached_property
    def _steps(self) -> list[TimedSteps]:
        return [self.steps_by_weights[tuple(weights)] for weights in self.weights]

    @cached_property
    def unit(self) -> Fraction:
        """The unit of all times."""
        times = {time.denominator for steps in self._steps for _, time in steps}
        messages = (time.denominator for time in self._hop.values())
        return Fraction(1, math.lcm(self.costs.latency.denominator, *messages, *times))

    @cached_property
    def steps(self) -> list[list[tuple[tuple[Item, ...], int]]]:
        """By rank, its lone actions and its pairs that gain, with their times."""
        return [[(items, int(time / self.unit)) for items, time in steps] for steps in self._steps]

    @cached_property
    def quickest(self) -> dict[tuple[str, Slot], int]:
        """(kind, slot) → the least time of a step with that action."""
        times: dict[tuple[str, Slot], int] = {}
        for rank, slots in enumerate(self.slots):
            least: dict[Item, int] = {}
            for items, time in self.steps[rank]:
                for item in items:
                    least[item] = min(time, least.get(item, time))
            for slot in slots:
                weight = self.weights[rank].index(self.weight(slot))
                times |= {(kind, slot): least[kind, weight] for kind in KINDS}
        return times

    @cached_property
    def back(self) -> dict[Slot, int]:
        """The least time of the backward that the previous stage waits for."""
        return {slot: min(self.quickest["B", slot], self.quickest["I", slot]) for slot in self.rank}

    @cached_property
    def full_backward(self) -> dict[Slot, int]:
        """The least time from the start of a backward until all of it has run."""
        quickest = self.quickest
        return {slot: min(quickest["B", slot], quickest["I", slot] + quickest["W", slot]) for slot in self.rank}

    @cached_property
    def release(self) -> dict[Slot, int]:
        """The least time from the start of a backward until it frees any of its activation."""
        return self.full_backward if self.costs.keeps == 1 else self.back

    @cached_property
    def least_gaps(self) -> dict[tuple[str, Slot], int]:
        """The least time between the starts of neighbouring micro-batches on a slot; 0 if a pair can run both."""
        gaps = {}
        for slot, rank in self.rank.items():
            k = self.weights[rank].index(self.weight(slot))
            pairs = {items[0][0] + items[1][0] for items, _ in self.steps[rank] if [w for _, w in items] == [k, k]}
            gaps["F", slot] = 0 if "FF" in pairs else self.quickest["F", slot]
            gaps["B", slot] = 0 if pairs & {"BB", "BI", "II"} else self.back[slot]
        return gaps

    @cached_property
    def hop(self) -> dict[Slot, int]:
        """The time of a message between a slot and the slot of the next stage, in either direction."""
        return {slot: int(time / self.unit) for slot, time in self._hop.items()}

    @cached_property
    def _hop(self) -> dict[Slot, Fraction]:
        ends = {(d, s): (self.rank[d, s], self.rank[d, s + 1]) for d, s in self.rank if s < self.last}
        return {slot: self.costs.message(a, b) if a != b else Fraction(0) for slot, (a, b) in ends.items()}

    @cached_property
    def room(self) -> list[tuple[Slot, Slot, int, int]]:
        """Forwards that wait for room: (slot, slot of the backward, its lag in micro-batches, time from its start)."""
        waits = []
        for slots, cap in zip(self.slots, self.caps or (), strict=False):
            for direction in range(len(self.counts)):
                of_direction = sorted(slot for slot in slots if slot[0] == direction)
                for u, backward in enumerate(of_direction, 1):
                    time = self._until_release(of_direction[:u])
                    waits += [
                        (slot, backward, int(max(0, cap - u) // min(i, u)) + 1, time)
                        for i, slot in enumerate(of_direction, 1)
                    ]
        return waits

    def _until_release(self, slots: Sequence[Slot]) -> int:
        """The least time from the start of the last slot's backward until its micro-batch first releases anything."""
        least, elapsed, (direction, stage) = self.release[slots[-1]], 0, slots[-1]
        for slot in reversed(slots[:-1]):
            while stage > slot[1]:
                elapsed += self.back[direction, stage] + self.hop[direction, stage - 1]
                stage -= 1
            least = min(least, elapsed + self.release[slot])
        return least

    # ---------------------------------------------------------------- times

    def zeros(self) -> Times:
        """A time of 0 for every action."""
        return {(kind, slot): [0] * self.counts[slot[0]] for kind in "FB" for slot in self.rank}

    def heads(self, least: Times, ends: Times) -> Times:
        """The earliest starts, none before `least`, if no action ends before `ends`."""
        heads = {key: list(row) for key, row in least.items()}
        room: dict[Slot, list[tuple[list[int], int, int]]] = {slot: [] for slot in self.rank}
        for slot, backward, lag, time in self.room:
            room[slot].append((heads["B", backward], lag, time))
        for k, direction in self._numbers():
            for stage in range(self.last + 1):
                slot = direction, stage
                row, quickest = heads["F", slot], self.quickest["F", slot]
                start = row[k]
                if stage:
                    before = direction, stage - 1
                    end = max(ends["F", before][k], heads["F", before][k] + self.quickest["F", before])
                    start = max(start, end + self.hop[before])
                for backwards, lag, time in room[slot]:
                    if k >= lag:
                        start = max(start, backwards[k - lag] + time)
                row[k] = max(start, _after(row, k, -1, self.least_gaps["F", slot], quickest))
            for stage in range(self.last, -1, -1):
                slot = direction, stage
                row = heads["B", slot]
                start = max(row[k], ends["F", slot][k], heads["F", slot][k] + self.quickest["F", slot])
                if stage < self.last:
                    behind = direction, stage + 1
                    end = max(ends["B", behind][k], heads["B", behind][k] + self.back[behind])
                    start = max(start, end + self.hop[slot])
                row[k] = max(start, _after(row, k, -1, self.least_gaps["B", slot], self.back[slot]))
        return heads

    def tails(self, least: Times, starts: Times) -> Times:
        """The least time from the end of each action to the end of all, none below `least`.

        `starts`: known lower bounds of the time from the start of each action to the end of all.
        """
        return self.rests(least, starts)[1]

    def rests(self, least: Times, starts: Times) -> tuple[Times, Times]:
        """The least time to the end of all, from the start of each action and from its end; see `tails`."""
        rests, tails = ({key: list(row) for key, row in times.items()} for times in (starts, least))
        room: dict[Slot, list[tuple[list[int], int, int]]] = {slot: [] for slot in self.rank}
        for slot, backward, lag, time in self.room:
            room[backward].append((rests["F", slot], lag, time))
        for k, direction in reversed(list(self._numbers())):
            for stage in range(self.last + 1):
                slot = direction, stage
                row, tail = rests["B", slot], tails["B", slot][k]
                if stage:
                    before = direction, stage - 1
                    tail = max(tail, self.hop[before] + rests["B", before][k])
                tails["B", slot][k] = tail
                remaining = max(row[k], self.full_backward[slot], self.back[slot] + tail)
                for forwards, lag, time in room[slot]:
                    if k + lag < len(forwards):
                        remaining = max(remaining, time + forwards[k + lag])
                row[k] = max(remaining, _after(row, k, 1, self.least_gaps["B", slot], self.back[slot]))
            for stage in range(self.last, -1, -1):
                slot = direction, stage
                row, tail = rests["F", slot], max(tails["F", slot][k], rests["B", slot][k])
                if stage < self.last:
                    tail = max(tail, self.hop[slot] + rests["F", (direction, stage + 1)][k])
                tails["F", slot][k] = tail
                quickest = self.quickest["F", slot]
                row[k] = max(row[k], quickest + tail, _after(row, k, 1, self.least_gaps["F", slot], quickest))
        return rests, tails

    def _numbers(self) -> Iterator[tuple[int, int]]:
        """Micro-batches and directions in an order in which none waits for a later one."""
        largest = max(self.counts)
        return ((k, direction) for k in range(largest) for direction, count in enumerate(self.counts) if k < count)

    def longest(self) -> Fraction:
        """The longest path of waits, or the time of all micro-batches in turn if that is a longer bound."""
        heads, (rests, _) = self.heads(self.zeros(), self.zeros()), self.rests(self.zeros(), self.zeros())
        longest = max(head + remaining for key in heads for head, remaining in zip(heads[key], rests[key], strict=True))
        return max(longest, self._serial_makespan()) * self.unit

    def _serial_makespan(self) -> int:
        """The time of all micro-batches in turn if they come from both ends and the outer ranks hold one activation.

        Two micro-batches in flight, one from each end, would wait for each other for ever: each holds the rank that the
        other needs. So the next one starts when the last stage has released this one or, if it comes from the same
        end, when the first stage has. The result is 0 if this does not apply.
        """
        if not self.caps or {self.caps[0], self.caps[-1]} != {1} or len(self.counts) < 2 or self.last < 1:
            return 0
        alone = replace(self, num_micro_batches=2, caps=None)
        heads, ends, directions = alone.heads(alone.zeros(), alone.zeros()), (0, self.last), range(2)
        freed = self.full_backward if self.costs.keeps else self.back  # the next one needs all of it
        turns = [min(heads["B", (d, end)][0] + freed[d, end] for end in ends) for d in directions]
        rests = [heads["B", (d, 0)][0] + self.full_backward[d, 0] - turns[d] for d in directions]
        return sum(n * turn for n, turn in zip(self.counts, turns, strict=True)) + min(rests)


def _after(row: Sequence[int], k: int, sign: int, apart: int, quickest: int) -> int:
    """The bound that the two neighbours of a micro-batch on its slot imply, as at most two run in one step."""
    near, far = k + sign, k + 2 * sign
    time = row[near] + apart if 0 <= near < len(row) else 0
    return max(time, row[far] + quickest) if 0 <= far < len(row) else time


@lru_cache(maxsize=256)
def steps_of(weights: tuple[Weight, ...], costs: Costs) -> TimedSteps:
    """The lone actions of some weights, and the pairs of them that gain, with their times.

    Results are cached: they are the same for each number of micro-batches.
    """
    return tuple(_steps_of(weights, costs))


def _steps_of(weights: Sequence[Weight], costs: Costs) -> Iterator[tuple[tuple[Item, ...], Fraction]]:
    items = [(kind, k) for kind in KINDS for k in range(len(weights))]
    weighted = replace(costs, stages=tuple(weights), ranks=())
    for item in items:
        yield (item,), weighted.step_time(Action(item[0], item[1], 0), 0)
    for pair in combinations_with_replacement(items, 2):
        first, second = (Action(kind, k, m) for m, (kind, k) in enumerate(pair))
        time = weighted.step_time(Pair(first, second), 0)
        if time < weighted.step_time(first, 0) + weighted.step_time(second, 0):
            yield pair, time
