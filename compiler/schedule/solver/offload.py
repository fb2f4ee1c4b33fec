"""`auto` with activations that can go to the host: schedules that exceed the cap, with copies that make them fit.

The search itself has no copies. It runs without a cap, under the given cap and under larger ones, and copies are placed
in its results. The result under the given cap needs no copies, so the final result is never longer than that one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeGuard

from compiler.ir.stage_placement import StagePlacement
from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule
from compiler.schedule.simulate import Timeline, held_at_most, simulate
from compiler.schedule.solver.solve import Cap, ScheduleRequest, Solution, Solver, check_request, default_cap
from runtime.contract.actions import Action, Step, actions_of, is_copy

# --- Place copies to the host in a schedule whose ranks exceed the cap, so that they do not
#
# The steps of a rank stay in order. An O is placed where there is no room for the next forward, so that the rank waits
# for the copy only if it must. An R is placed as late as its backward allows, or later if there is no room. Where room
# is missing, activations to offload are chosen one by one: of those that cause the least delay, the one that is needed
# last (PipeOffload, arXiv 2503.01328, offloads those that live longest). Placing starts from the times without copies,
# and is repeated a few times with the times of the last result.

_ROUNDS = 4  # rounds of placing and timing
_Key = tuple[int, int]  # a stage and a micro-batch


def add_copies(schedule: Schedule, costs: Costs, caps: Sequence[Fraction]) -> tuple[Schedule, Timeline] | None:
    """Add copies to a schedule so that each rank stays under its cap; returns it with its times.

    Returns None if no such choice of copies exists or was found.
    """
    if all(peak <= cap for peak, cap in zip(held_at_most(schedule, costs.keeps), caps, strict=True)):
        return schedule, simulate(schedule, costs)
    results = [result for eager in (False, True) if (result := _add_copies(schedule, costs, caps, eager))]
    return min(results, key=lambda result: result[1].makespan, default=None)


def _add_copies(
    schedule: Schedule, costs: Costs, caps: Sequence[Fraction], eager: bool
) -> tuple[Schedule, Timeline] | None:
    placed, timeline, best = schedule, simulate(schedule, costs), None
    for _ in range(_ROUNDS):
        rows = []
        for rank, cap in enumerate(caps):
            steps, ticks = placed.actions[rank], timeline.ticks[rank]
            spans = [span for span, step in zip(ticks, steps, strict=True) if not is_copy(step)]
            row = _OffloadRow(
                [step for step in steps if not is_copy(step)], spans, timeline.unit, costs, cap
            ).place_copies(eager)
            if row is None:
                return best
            rows.append(row)
        placed = replace(schedule, actions=tuple(rows))
        timeline = simulate(placed, costs)
        if best is None or timeline.makespan < best[1].makespan:
            best = placed, timeline
    return best


def _is_w(step: Step) -> TypeGuard[Action]:
    return isinstance(step, Action) and step.kind == "W"


class _NoRoomError(Exception):
    """There is no room for a step, or for an activation that returns before it."""

    def __init__(self, step: int, returning: _Key | None) -> None:
        self.step, self.returning = step, returning


class _NotNeededError(Exception):
    """An activation need not be offloaded: there is room until it is needed again."""

    def __init__(self, key: _Key) -> None:
        self.key = key


class _OffloadRow:
    """The steps of a rank with their start and end times, in whole numbers of one unit."""

    def __init__(
        self, steps: Sequence[Step], spans: Sequence[tuple[int, int]], unit: Fraction, costs: Costs, cap: Fraction
    ) -> None:
        assert costs.O is not None and costs.R is not None
        ticks = math.lcm(unit.denominator, costs.O.denominator, costs.R.denominator)
        scale = int(unit * ticks)
        self.steps = [*steps]
        self.starts, self.ends = [start * scale for start, _ in spans], [end * scale for _, end in spans]
        self.o_time, self.r_time = int(costs.O * ticks), int(costs.R * ticks)
        self.activation_parts, w_parts = costs.keeps.denominator, costs.keeps.numerator
        self.cap = int(cap * self.activation_parts)
        frees = {"F": 0, "B": self.activation_parts, "I": self.activation_parts - w_parts, "W": w_parts}
        self.takes = [self.activation_parts * sum(a.kind == "F" for a in actions_of(step)) for step in steps]
        self.frees = [sum(frees[a.kind] for a in actions_of(step)) for step in steps]
        self.forward: dict[_Key, int] = {}  # index of the step with each forward and backward
        self.backward: dict[_Key, int] = {}
        self._index_actions()

    def _index_actions(self) -> None:
        for k, step in enumerate(self.steps):
            for action in actions_of(step):
                if action.kind != "W":
                    (self.forward if action.kind == "F" else self.backward)[action.stage, action.micro_batch] = k

    def _move_w_before(self, step: int) -> bool:
        """Move the next lone W that is due before a step; returns False if there is none."""
        for k in range(step + 1, len(self.steps)):
            w = self.steps[k]
            if _is_w(w) and self.backward[w.stage, w.micro_batch] < step:
                time = self.ends[k] - self.starts[k]
                self.steps.insert(step, self.steps.pop(k))
                for row in (self.takes, self.frees):
                    row.insert(step, row.pop(k))
                del self.starts[k], self.ends[k]
                begin = self.starts[step]
                for times in (self.starts, self.ends):
                    times[step:k] = [tick + time for tick in times[step:k]]
                self.starts.insert(step, begin)
                self.ends.insert(step, begin + time)
                self._index_actions()
                return True
        return False

    def place_copies(self, eager: bool) -> tuple[Step, ...] | None:
        """The steps with their copies; None if no choice of copies makes room."""
        away: set[_Key] = set()  # activations that go to the host
        stay: set[_Key] = set()  # those that need not go, as they would be back before room is missing
        late: set[_Key] = set()  # those that return only when there is room or nothing else can run
        while True:
            walk = _Walk(self, away, late, eager)
            try:
                return walk.run()
            except _NotNeededError as error:
                away.discard(error.key)
                stay.add(error.key)
            except _NoRoomError as error:
                delay, chosen = self._choice(error.step, away, stay, walk.gone_at)
                if chosen is not None and not (delay and eager and self._move_w_before(error.step)):
                    away.add(chosen)
                elif chosen is not None:
                    pass  # a W ran instead
                elif error.returning is not None and self.backward[error.returning] > error.step:
                    late.add(error.returning)
                elif not self._move_w_before(error.step):
                    return None

    def returns(self, away: Set[_Key]) -> list[tuple[int, _Key]]:
        """(index of a step, activation) for those away, in the order of their backwards.

        An activation returns before that step, so that its backward need not wait.
        """
        returns, free = [], None
        for key in sorted(away, key=self.backward.__getitem__, reverse=True):
            end = self.starts[self.backward[key]]
            free = (end if free is None else min(end, free)) - self.r_time
            before = bisect_right(self.ends, free)
            returns.append((min(max(before, self.forward[key] + 1), self.backward[key]), key))
        return returns[::-1]

    def _choice(self, step: int, away: Set[_Key], stay: Set[_Key], gone_at: Sequence[int]) -> tuple[int, _Key | None]:
        """The activation to offload next to make room for a step, and its delay: the last needed of the least delay."""
        candidates = (
            key for key, k in self.forward.items() if k < step < self.backward[key] and key not in away | stay
        )
        delays = ((self._delay(step, key, away, gone_at), -self.backward[key], key) for key in candidates)
        delay, _, key = min(delays, default=(0, 0, None))
        return delay, key

    def _delay(self, step: int, key: _Key, away: Set[_Key], gone_at: Sequence[int]) -> int:
        """The delay of a step or backward if an activation is offloaded, after those that have left by then."""
        end = delay = 0
        gone = sorted(
            [key, *(activation for activation in away if self.forward[activation] < step)], key=self.forward.__getitem__
        )
        for activation, needed in zip(gone, (*gone_at, self.starts[step]), strict=False):
            end = max(end, self.ends[self.forward[activation]]) + self.o_time
            delay = max(delay, end - needed)
        begin = min(before for before, activation in self.returns({*away, key}) if activation == key)
        return delay + max(0, self.ends[step] - self.ends[max(begin - 1, 0)])


class _Walk:
    """Adds copies to the steps of a row: to the host in the order of forwards, and back in the order of backwards."""

    def __init__(self, row: _OffloadRow, away: Set[_Key], late: Set[_Key], eager: bool) -> None:
        self.row, self.late, self.eager = row, late, eager
        self.queue = sorted(away, key=row.forward.__getitem__)
        self.gone_at: list[int] = []  # for each activation that has gone, the time at which room was missing
        self.held_parts = 0
        self.steps: list[Step] = []

    def run(self) -> tuple[Step, ...]:
        """The steps with copies. Raises _NoRoomError or _NotNeededError if the choice of activations must change."""
        row, back = self.row, 0
        returns = row.returns({*self.queue})
        for k, step in enumerate(row.steps):
            while back < len(returns) and returns[back][0] <= k:
                key = returns[back][1]
                if key in self.queue[len(self.gone_at) :]:
                    raise _NotNeededError(key)
                waits = key in self.late or (self.eager and _is_w(step))  # a W makes room
                if self.held_parts + row.activation_parts > row.cap and waits and row.backward[key] > k:
                    break
                self._make_room(k, row.activation_parts, key)
                self._add(Action("R", *key), row.activation_parts)
                back += 1
            self._make_room(k, row.takes[k])
            self._add(step, row.takes[k] - row.frees[k])
        return tuple(self.steps)

    def _add(self, step: Step, added_parts: int) -> None:
        self.steps.append(step)
        self.held_parts += added_parts

    def _make_room(self, k: int, needed: int, returning: _Key | None = None) -> None:
        while self.held_parts + needed > self.row.cap:
            key = self.queue[len(self.gone_at)] if len(self.gone_at) < len(self.queue) else None
            if key is None or self.row.forward[key] >= k:
                raise _NoRoomError(k, returning)
            if self.row.backward[key] <= k:
                raise _NotNeededError(key)
            self.gone_at.append(self.row.starts[k])
            self._add(Action("O", *key), -self.row.activation_parts)


# --- offload

_SHARE = 0.3  # share of the effort for each search under another cap
_LARGER = (Fraction(2), Fraction(3, 2), Fraction(5, 4))  # other caps, as multiples of the given one
Search = Callable[[Solver], Solution]


def solve_with_copies(solver: Solver, num_ranks: int, num_stages: int, search: Search) -> Solution:
    """The best result of `search` under the solver's cap, or under other caps with copies.

    `num_stages`: the number of stages that the costs and the cap of the solver refer to. Without a cap, no copies are
    needed. Raises ValueError as the search does.
    """
    device = replace(solver, costs=solver.costs.without_offload())
    if solver.cap is None:
        return search(device)
    results = _FoundOffloads(
        check_request(ScheduleRequest(num_ranks, 1, solver.costs, num_stages, solver.cap)), solver.cap
    )
    results.add(search(replace(device, cap=None, effort=_SHARE * solver.effort)))
    if results.best is None or results.bound(device.costs) <= results.key()[0]:
        results.add(search(device))
    for cap in _larger(solver.cap, num_ranks, num_stages):
        if results.key()[0] > results.bound(solver.costs):
            results.add(search(replace(device, cap=cap, effort=_SHARE * solver.effort)))
    return results.solution()


def _larger(cap: Cap, num_ranks: int, num_stages: int) -> Iterator[Cap]:
    """Larger caps that still limit a schedule, so that fewer activations must be copied than without a cap."""
    of_rank = cap if isinstance(cap, tuple) else (cap,)
    for factor in _LARGER:
        if max(of_rank) * factor < Fraction(default_cap(num_ranks) * num_stages, num_ranks):
            yield tuple(rank_cap * factor for rank_cap in of_rank) if isinstance(cap, tuple) else cap * factor


@dataclass
class _FoundOffloads:
    """The results of the searches so far. `request` has their number of micro-batches."""

    request: ScheduleRequest
    cap: Cap
    best: Solution | None = None
    copies: int = 0  # of the best
    searched: dict[StagePlacement, None] = field(default_factory=dict)

    def key(self) -> tuple[Fraction, int]:
        """The makespan, and then the number of copies; the least is the best."""
        assert self.best is not None  # the search under the given cap needs no copies
        return self.best.makespan, self.copies

    def bound(self, costs: Costs) -> Fraction:
        """The lower bound under the cap with these costs, over the placements that were searched."""
        return min(replace(self.request, costs=costs).bound(placement, self.cap) for placement in self.searched)

    def add(self, solution: Solution) -> None:
        """Add copies to a schedule, and keep it if it is better."""
        schedule, placement = solution.schedule, solution.schedule.stage_placement
        self.request = replace(self.request, num_micro_batches=schedule.num_micro_batches)
        self.searched |= dict.fromkeys(solution.searched)
        costs, caps = self.request.costs_on(placement), self.request.caps_on(placement, self.cap)
        placed = add_copies(schedule, costs, caps)
        if placed is None:
            return
        makespan, copies = placed[1].makespan, sum(map(len, placed[1].copies))
        if self.best is None or (makespan, copies) < self.key():
            self.copies = copies
            self.best = replace(solution, schedule=placed[0], costs=costs, cap=max(caps), makespan=makespan)

    def solution(self) -> Solution:
        """The best solution, with the bound of all placements that were searched."""
        assert self.best is not None
        return replace(self.best, lower_bound=self.bound(self.request.costs), searched=tuple(self.searched))
