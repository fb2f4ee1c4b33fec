"""A lower bound for small pipelines: all orders of each rank, alternating with the waits between ranks.

A state of a rank is how many forwards and backwards of each slot it has run, and how many W are due. The other ranks
are relaxed to times: no action starts before its head, and after its end at least its tail is still to come. Of two
ways to a state, the earlier one is never worse, so one pass over all steps finds the earliest start of every action.
This start is a head that other ranks wait for (`Waits`). If some action cannot end in time, no schedule can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from compiler.schedule.waits import Item, Slot, Times, Waits

QUICK = 60_000  # work, in steps, of a bound that is needed often: about 0.1 s
_MOST_STATES = 5000  # of a rank
_MOST_FORWARDS = 16  # of a rank; with more, there are mostly too many states
_Runs = tuple[tuple[int, int], ...]  # (2 s, number) of an F of the rank's slot s, or (2 s + 1, number) of a B or I
RankStep = tuple[int, int, int, _Runs]  # (state before, state after, time, actions)
State = tuple[int, ...]  # forwards and backwards of each slot, then the due W of each weight


class SmallPipeline:
    """The ranks of a small pipeline, and the work that is left. Work is counted in steps, so results are repeatable."""

    def __init__(self, waits: Waits, work: int) -> None:
        self.waits, self.work = waits, work
        self.ranks: list[tuple[RankStates, list[Slot]]] = []
        states_by_key: dict[object, RankStates | None] = {}
        for rank, slots in enumerate(waits.slots):
            if sum(waits.counts[direction] for direction, _ in slots) > _MOST_FORWARDS:
                continue
            rules = Rules(waits, rank)
            if rules.key not in states_by_key:
                states_by_key[rules.key] = RankStates.of(rules, min(_MOST_STATES, self.work // 10))
            if (states := states_by_key[rules.key]) is not None:
                self.ranks.append((states, slots))
                self.work -= len(states.steps)

    def bound(self, least: Fraction) -> Fraction:
        """A bound of at least `least`, improved while there is work left."""
        unit = self.waits.unit
        low, high = math.ceil(least / unit) - 1, None  # no schedule ends by `low`; one may end by `high`
        step = max(1, low // 50)
        while (high is None or high - low > 1) and self.ranks and self.work > 0:
            middle = low + step if high is None else (low + high) // 2
            if self.fits(middle):
                high = middle
            else:
                low, step = middle, 2 * step
        return max(least, (low + 1) * unit)

    def fits(self, end: int) -> bool:
        """Whether a schedule may end by `end`; False if it is proven that none can."""
        heads, ends, tails, rests = (self.waits.zeros() for _ in range(4))
        before = None
        while before != (heads, tails) and self.work > 0:
            before = heads, tails
            heads, (rests, tails) = self.waits.heads(heads, ends), self.waits.rests(tails, rests)
            for states, slots in self.ranks:
                self.work -= len(states.steps)
                windows = states.windows(slots, heads, tails, end)
                if windows is None:
                    return False
                heads, ends, tails, rests = (
                    old | new for old, new in zip((heads, ends, tails, rests), windows, strict=True)
                )
        return True


@dataclass(frozen=True)
class RankStates:
    """The steps from state to state. Steps to a state come before steps from it."""

    states: list[State]
    end: int  # the state in which all actions have run
    steps: list[RankStep]

    @staticmethod
    def of(rules: Rules, max_states: int) -> RankStates | None:
        """The states of a rank; None if there are more than `max_states`, or no way to the end under the cap."""
        start = tuple(0 for _ in rules.end)
        numbers, steps = {start: 0}, []
        levels: list[list[State]] = [[] for _ in range(rules.level(rules.end) + 1)]
        levels[0].append(start)
        for level in levels:
            for state in level:
                for new, time, runs in rules.next(state):
                    if new not in numbers:
                        if len(numbers) >= max_states:
                            return None
                        numbers[new] = len(numbers)
                        levels[rules.level(new)].append(new)
                    steps.append((numbers[state], numbers[new], time, runs))
        return RankStates([*numbers], numbers[rules.end], steps) if rules.end in numbers else None

    def windows(
        self, slots: Sequence[Slot], heads: Times, tails: Times, end: int
    ) -> tuple[Times, Times, Times, Times] | None:
        """When a rank's actions can start and end if everything ends by `end`; None if that is impossible.

        Returns the earliest starts and ends, and the least times from the ends and from the starts to `end`.
        """
        never = end + 1
        keys = [(kind, slot) for slot in slots for kind in "FB"]
        starts, ends, after, rests = ([[never] * len(heads[key]) for key in keys] for _ in range(4))
        fitting = self._fitting(slots, heads, tails, end)
        if fitting is None:
            return None
        for (_, _, time, runs), begin, remaining in fitting:
            for row, k in runs:
                starts[row][k] = min(starts[row][k], begin)
                ends[row][k] = min(ends[row][k], begin + time)
                after[row][k] = min(after[row][k], remaining - time)
                rests[row][k] = min(rests[row][k], remaining)
        first, second, third, fourth = (dict(zip(keys, rows, strict=True)) for rows in (starts, ends, after, rests))
        return first, second, third, fourth

    def _fitting(
        self, slots: Sequence[Slot], heads: Times, tails: Times, end: int
    ) -> list[tuple[RankStep, int, int]] | None:
        """The steps on ways to the last state by `end`, later ones first; None if there is no such way.

        Each has its earliest start, and the least time from its start to the end of all.
        """
        never = end + 1
        keys = [(kind, slot) for slot in slots for kind in "FB"]
        head, tail = ([times[key] for key in keys] for times in (heads, tails))
        free = [never] * len(self.states)
        free[0] = 0
        possible = []
        for step in self.steps:
            source, target, time, runs = step
            begin, behind = free[source], 0
            if begin == never:
                continue
            for row, k in runs:
                if head[row][k] > begin:
                    begin = head[row][k]
                if tail[row][k] > behind:
                    behind = tail[row][k]
            if begin + time + behind <= end:
                free[target] = min(free[target], begin + time)
                possible.append((step, begin, behind))
        to_end = [never] * len(self.states)  # from a state to the end of all
        to_end[self.end] = 0
        fits = []
        for step, begin, behind in reversed(possible):
            source, target, time, _ = step
            remaining = max(behind, to_end[target]) + time
            if begin + remaining <= end:
                to_end[source] = min(to_end[source], remaining)
                fits.append((step, begin, remaining))
        return fits if to_end[0] < never else None


class Rules:
    """The rules for what a rank may run next."""

    def __init__(self, waits: Waits, rank: int) -> None:
        slots = waits.slots[rank]
        parts = waits.costs.keeps.denominator  # parts of an activation, in which memory is counted
        self.activation_parts, self.w_parts = parts, waits.costs.keeps.numerator
        self.cap = int(waits.caps[rank] * parts) if waits.caps else None
        self.due = 2 * len(slots)  # index in a state where the due W begin
        self.weight = [waits.weights[rank].index(waits.weight(slot)) for slot in slots]
        self.counts = [waits.counts[direction] for direction, _ in slots]
        self.end: State = (*(n for n in self.counts for _ in "FB"), *(0 for _ in waits.weights[rank]))
        neighbours = [
            [s for s, (slot_direction, _) in enumerate(slots) if slot_direction == direction] for direction, _ in slots
        ]
        self.before = [max((s for s in peers if s < index), default=None) for index, peers in enumerate(neighbours)]
        self.behind = [min((s for s in peers if s > index), default=None) for index, peers in enumerate(neighbours)]
        self.choices = [(choice, time) for items, time in waits.steps[rank] for choice in self._choices(items)]
        self.key = (*self.choices, self.cap, *self.counts, *self.before, *self.behind, *self.weight)  # of ranks alike

    def level(self, state: State) -> int:
        """A number that every step raises: an F by 1, a B by 3, an I by 2 and a W by 1."""
        return sum(state[0 : self.due : 2]) + 3 * sum(state[1 : self.due : 2]) - sum(state[self.due :])

    def next(self, state: State) -> list[tuple[State, int, _Runs]]:
        """The steps from a state, as (state after it, time, actions)."""
        live = self.activation_parts * (sum(state[0 : self.due : 2]) - sum(state[1 : self.due : 2]))
        live += self.w_parts * sum(state[self.due :])
        steps = []
        for items, time in self.choices:
            added = self.activation_parts * sum(kind == "F" for kind, _ in items)
            room = self.cap is None or live + added <= self.cap
            if room and (new := self._after(state, items)) is not None:
                steps.append((new[0], time, new[1]))
        return steps

    def _choices(self, items: Sequence[Item]) -> list[tuple[tuple[str, int], ...]]:
        """The steps of slots for a step of weights. A W stays with its weight."""
        choices: list[tuple[tuple[str, int], ...]] = [()]
        for kind, weight in items:
            places = (
                [weight] if kind == "W" else [s for s, slot_weight in enumerate(self.weight) if slot_weight == weight]
            )
            choices = [(*choice, (kind, place)) for choice in choices for place in places]
        return list({tuple(sorted(choice)): choice for choice in choices}.values())

    def _after(self, state: State, items: Sequence[tuple[str, int]]) -> tuple[State, _Runs] | None:
        """The state after a step and its actions; None if an action needs one that has not run yet."""
        new, runs = list(state), []
        for kind, index in items:
            if kind == "W":
                new[self.due + index] -= 1
                if new[self.due + index] < 0:
                    return None
                continue
            if kind == "F":
                before, limit = self.before[index], self.counts[index]
                limit = limit if before is None else state[2 * before]
            else:
                behind = self.behind[index]
                limit = state[2 * index] if behind is None else state[2 * behind + 1]
            place = 2 * index + (kind != "F")
            if new[place] >= limit:
                return None
            runs.append((place, new[place]))
            new[place] += 1
        for kind, index in items:  # a W of this step belongs to an earlier I
            new[self.due + self.weight[index]] += kind == "I" if kind != "W" else 0
        return tuple(new), tuple(runs)
