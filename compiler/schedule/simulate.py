"""Simulates a schedule under a table of costs, exactly: when each step starts and ends.

Ranks run their steps in order. A step starts when its rank is free and its inputs from other stages have arrived. A
message to another rank takes its time and occupies no rank.

An O marks where its rank needs the memory: the copy begins after its F, and the rank waits at the O until it ends. An R
marks where there is memory again: the copy begins there, and the B or I waits until it ends. Each rank copies its O in
order, one at a time, and its R in parallel to them.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from typing import Protocol

from compiler.schedule.numbering import SlotRow
from compiler.schedule.schedule import Schedule, ScheduleError
from runtime.contract.actions import Action, ActionKind, Step, actions_of, is_copy

# --- Run the steps of ranks that wait for each other's events

Ticks = MutableSequence[int]
Links = Mapping[tuple[bool, int, bool], tuple[int, int, int]]  # by whether forward, stage, and whether in direction 1
# The time of a step, and for each of its two actions: the event that it waits for, the event that it makes, and the
# delay until the latter arrives.
Run = tuple[int, int, int, int, int, int, int]


def run_in_turn(rows: Sequence[Sequence[Run]], num_events: int, max_time: int) -> tuple[list[Ticks], list[Ticks]]:
    """The start and end times of the steps of each rank. `max_time`: an upper bound of all times.

    A rank that waits for ever has only the times of the steps before.
    """
    # Arrival by event; then the event at the start, and one nobody waits for.
    done = [*_unset_times(max_time, num_events), 0, -1]
    starts, ends = ([_unset_times(max_time) for _ in rows] for _ in range(2))
    waiting: dict[int, list[int]] = {}  # event that has not arrived -> ranks that wait for it
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        row, start, end = rows[rank], starts[rank], ends[rank]
        clock = end[-1] if end else 0
        for k in range(len(end), len(row)):
            time, wants, makes, delay, wants_also, makes_also, delay_also = row[k]
            ready, ready_also = done[wants], done[wants_also]
            if ready < 0 or ready_also < 0:
                waiting.setdefault(wants if ready < 0 else wants_also, []).append(rank)
                break
            clock = max(clock, ready, ready_also)
            start.append(clock)
            clock += time
            end.append(clock)
            done[makes], done[makes_also] = clock + delay, clock + delay_also
            if waiting:
                runnable.extend(waiting.pop(makes, ()))
                runnable.extend(waiting.pop(makes_also, ()))
    return starts, ends


def _unset_times(max_time: int, count: int = 0) -> Ticks:
    """`count` numbers of -1, in a list that can hold numbers up to `max_time`; of eight bytes each if they fit."""
    return array("q", [-1]) * count if max_time < 2**63 else [-1] * count


# --- Run ranks with copies to the host and back, in one lane per direction beside each rank

EVENTS = 4  # of an offloaded activation: its F has ended, it is on the host, its R is reached, it has returned
_Key = tuple[int, int]  # a stage and a micro-batch
_Row = list[tuple[int, Run]]  # (index of the step or -1, run)


def run_with_copies(
    actions: Sequence[Sequence[Step]],
    rows: Sequence[Sequence[Run]],
    first_copy_event: int,
    num_events: int,
    max_time: int,
) -> tuple[list[Ticks], list[Ticks], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """The start and end times of steps, as in `run_in_turn`, and (step, start, end) of each rank's copies.

    `first_copy_event`: the first of the events of copies. There are EVENTS of them for each O.
    """
    offloaded = [
        (a.stage, a.micro_batch) for steps in actions for a in steps if isinstance(a, Action) and a.kind == "O"
    ]
    away = {key: first_copy_event + EVENTS * number for number, key in enumerate(offloaded)}
    of_ranks = [_lanes(steps, row, away, num_events) for steps, row in zip(actions, rows, strict=True)]
    lanes = [lane for rank in of_ranks for lane in rank]
    starts, ends = run_in_turn([[run for _, run in lane] for lane in lanes], num_events, max_time)
    spans = [
        [(k, start, end) for (k, _), start, end in zip(*of_lane, strict=False) if k >= 0]
        for of_lane in zip(lanes, starts, ends, strict=True)
    ]
    compute = spans[::3]
    copies = tuple(
        tuple(sorted(to_host + from_host)) for to_host, from_host in zip(spans[1::3], spans[2::3], strict=True)
    )
    return [[s for _, s, _ in lane] for lane in compute], [[e for _, _, e in lane] for lane in compute], copies


def _lanes(steps: Sequence[Step], row: Sequence[Run], away: dict[_Key, int], events: int) -> tuple[_Row, _Row, _Row]:
    """The lanes of a rank: its compute, its copies to the host, and its copies back."""
    to_host: _Row = []
    from_host: _Row = []
    compute: _Row = []

    def run(time: int, wants: int = events, makes: int = events + 1) -> Run:
        return (time, wants, makes, 0, events, events + 1, 0)

    for k, (step, of_step) in enumerate(zip(steps, row, strict=True)):
        if isinstance(step, Action) and is_copy(step):
            event = away[step.stage, step.micro_batch]
            if step.kind == "O":
                to_host.append((k, run(of_step[0], event, event + 1)))
                compute.append((k, run(0, wants=event + 1)))
            else:
                from_host.append((k, run(of_step[0], event + 2, event + 3)))
                compute.append((k, run(0, makes=event + 2)))
            continue
        compute += [(-1, run(0, wants=event + 3)) for event in _events(step, "BI", away)]
        compute.append((k, of_step))
        compute += [(-1, run(0, makes=event)) for event in _events(step, "F", away)]
    return compute, to_host, from_host


def _events(step: Step, kinds: str, away: dict[_Key, int]) -> Iterator[int]:
    """The first event of each action in a step that has one of the `kinds` and whose activation is offloaded."""
    for action in actions_of(step):
        if action.kind in kinds and (event := away.get((action.stage, action.micro_batch))) is not None:
            yield event


# --- simulate


class Prices(Protocol):
    """Times of steps: a table of costs by kinds and weights, or the times of a plan's stages."""

    @property
    def micro_batches(self) -> Sequence[Fraction]:
        """Factors of the actions on each micro-batch; empty if all are alike."""

    @property
    def keeps(self) -> Fraction:
        """The share of an activation that is held from the end of its I to the end of its W."""

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another one with a neighbouring stage."""

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """Raise ValueError if the prices are for other sizes."""

    def step_time(self, step: Step, rank: int) -> Fraction:
        """Time of a step on a pipeline rank."""


@dataclass(frozen=True)
class Timeline:
    """The start and end of each step. Times are in the unit of the costs.

    An O or R takes no time on its rank: it starts and ends when the rank goes on after it.
    """

    starts: tuple[Sequence[int], ...]  # by rank and step, in ticks of `unit`
    ends: tuple[Sequence[int], ...]
    unit: Fraction
    peak_activations: tuple[Fraction, ...]  # by rank, the most activations that it holds
    copies: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # by rank, (step, start, end) of each O and R

    @cached_property
    def ticks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By rank and step, (start, end) in ticks."""
        return tuple(tuple(zip(*rank, strict=True)) for rank in zip(self.starts, self.ends, strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Fraction, Fraction], ...], ...]:
        """By rank and step, (start, end)."""
        return tuple(tuple((start * self.unit, end * self.unit) for start, end in rank) for rank in self.ticks)

    @cached_property
    def makespan(self) -> Fraction:
        """The end of the last step."""
        return max(rank[-1] for rank in self.ends if rank) * self.unit

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """By rank, the time of the makespan in which it runs nothing."""
        busy = (sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))
        return tuple(self.makespan - time * self.unit for time in busy)


def simulate(schedule: Schedule, costs: Prices) -> Timeline:
    """Run a schedule that `check` accepts, in O(actions).

    Stage s on micro-batch m makes event 2(sN + m) in its F, and event 2(sN + m) + 1 in its B or I. Raises ScheduleError
    with the rank and the step if ranks wait for each other for ever, and ValueError if the costs do not have as many
    weights as there are stages, ranks and micro-batches.
    """
    costs.check(schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches)
    messages = _messages(schedule, costs)
    unit, tables, places = _ticks(schedule, costs, messages.values())
    delays = {ends: int(time / unit) for ends, time in messages.items()}
    events = 2 * schedule.num_stages * schedule.num_micro_batches
    latest = sum(max(table, default=0) * len(place) for table, place in zip(tables, places, strict=True))
    latest += events * max(delays.values(), default=0)
    links = [_links(schedule, rank, delays) for rank in range(schedule.num_ranks)]
    copies: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    copied = EVENTS * sum(map(is_copy, chain(*schedule.actions))) // 2
    of_ranks = zip(schedule.actions, tables, places, links, strict=True)
    rows = [list(_runs(*of_rank, schedule.turn, events + copied)) for of_rank in of_ranks]
    if copied:
        starts, ends, copies = run_with_copies(schedule.actions, rows, events, events + copied, latest)
    else:
        starts, ends = run_in_turn(rows, events, latest)
    for rank, steps in enumerate(schedule.actions):
        if len(ends[rank]) < len(steps):
            raise ScheduleError(f"rank {rank}, {steps[len(ends[rank])]}: waits for ever for ranks that wait for it")
    return Timeline(tuple(starts), tuple(ends), unit, held_at_most(schedule, costs.keeps), copies)


def has_copies(schedule: Schedule) -> bool:
    """Whether a schedule copies anything to the host and back."""
    return any(map(is_copy, chain(*schedule.actions)))


def _runs(
    steps: Sequence[Step], table: Sequence[int], place: Iterable[int], links: Links, turn: int, events: int
) -> Iterator[Run]:
    """The steps of a rank as runs."""
    for step, index in zip(steps, place, strict=True):
        run = [table[index]]
        for action in actions_of(step):
            if action.kind == "W":
                run += (events, events + 1, 0)
            else:
                wants, makes, delay = links[action.kind == "F", action.stage, action.micro_batch >= turn]
                run += (wants + 2 * action.micro_batch if wants >= 0 else events, makes + 2 * action.micro_batch, delay)
        time, wants, makes, delay, *second = run
        yield (time, wants, makes, delay, *(second or (events, events + 1, 0)))


def held_at_most(schedule: Schedule, keeps: Fraction) -> tuple[Fraction, ...]:
    """By rank, the most activations that it holds. An I frees all but the share `keeps` of one, and its W the rest."""
    return tuple(Fraction(peak, keeps.denominator) for peak in _peaks(schedule, keeps.denominator, keeps.numerator))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """By rank, the most live activations: one more at the start of an F or R, and one less at the end of a B, W or O.

    Without backwards (evaluation), a forward keeps nothing after its end.
    """
    return _peaks(schedule, 1, 1)


def _peaks(schedule: Schedule, parts: int, w_parts: int) -> tuple[int, ...]:
    """By rank, the most parts of activations that it holds. An activation keeps `w_parts` from its I to its W."""
    trains = any(kind != "F" for steps in schedule.actions for kinds in _kinds(steps) for kind in kinds)
    freed = {"F": 0, "R": 0, "O": parts, "B": parts, "I": parts - w_parts, "W": w_parts} if trains else {"F": parts}
    return tuple(_peak(steps, parts, freed) for steps in schedule.actions)


def _peak(steps: Sequence[Step], parts: int, freed: Mapping[str, int]) -> int:
    live = peak = 0
    for kinds in _kinds(steps):
        live += parts * (kinds.count("F") + kinds.count("R"))
        if live > peak:
            peak = live
        for kind in kinds:
            live -= freed[kind]
    return peak


def _kinds(steps: Sequence[Step]) -> Iterator[list[ActionKind]]:
    """The kinds of the actions of each step."""
    if isinstance(steps, SlotRow):
        return ([kind for kind, _ in slot] for slot in steps.slots)
    return ([action.kind for action in actions_of(step)] for step in steps)


def _messages(schedule: Schedule, costs: Prices) -> dict[tuple[int, int], Fraction]:
    """(source, target) → time of a message; 0 from a rank to itself."""
    ends = set()
    for micro_batch in {0, schedule.num_micro_batches - 1}:  # one of each direction
        ranks = [schedule.rank_of(stage, micro_batch) for stage in range(schedule.num_stages)]
        ends |= {pair for a, b in pairwise(ranks) for pair in ((a, b), (b, a))}
    return {(a, b): costs.message(a, b) if a != b else Fraction(0) for a, b in ends}


def _ticks(
    schedule: Schedule, costs: Prices, messages: Iterable[Fraction]
) -> tuple[Fraction, list[list[int]], list[Sequence[int]]]:
    """The unit of all times; by rank, its distinct times in that unit; by rank and step, the index of its time."""
    places: list[Sequence[int]] = []
    tables: list[list[Fraction]] = []
    by_micro_batch = bool(costs.micro_batches)
    for rank, steps in enumerate(schedule.actions):
        distinct, place = _distinct(steps, by_micro_batch)
        tables.append([costs.step_time(step, rank) for step in distinct])
        places.append(place)
    unit = Fraction(1, math.lcm(*(value.denominator for value in {*messages, *chain(*tables)})))
    return unit, [[int(time / unit) for time in table] for table in tables], places


def _distinct(steps: Sequence[Step], by_micro_batch: bool) -> tuple[list[Step], Sequence[int]]:
    """The distinct steps, and for each step the index of the one that it equals."""
    numbers: dict[tuple[object, ...], int] = {}
    distinct: list[Step] = []
    place = array("L")
    for step in steps:
        key: tuple[object, ...] = actions_of(step)
        if not by_micro_batch:
            key = tuple([(action.kind, action.stage) for action in actions_of(step)])
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(step)
        place.append(numbers[key])
    return distinct, place


def _links(schedule: Schedule, rank: int, delays: Mapping[tuple[int, int], int]) -> Links:
    """By action of a rank: the event that it waits for on micro-batch 0, or -1; the event it makes; its delay."""
    N, links = schedule.num_micro_batches, {}
    for stage in schedule.stages_of(rank):
        for forward in (True, False):
            for late in (False, True):
                before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                wanted, delay = -1, 0
                if 0 <= before < schedule.num_stages:
                    wanted = 2 * before * N + (not forward)
                if 0 <= behind < schedule.num_stages:
                    target = schedule.rank_of(behind, N - 1 if late else 0)
                    delay = delays.get((rank, target), 0)
                links[forward, stage, late] = (wanted, 2 * stage * N + (not forward), delay)
    return links
