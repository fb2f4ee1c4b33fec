"""Runs a schedule against a table of costs, exactly: when each step starts and ends, and who waits.

Ranks do their steps in order; a step starts when its rank is free and what its actions need from other stages is
there. A message to another rank takes its time and occupies nobody.

An O stands where its rank needs the memory: the copy begins behind its F, and the rank waits at the O for its end. An R
stands where the memory is there: the copy begins, and the B or I waits for its end. Of a rank, all O are copied in the
order in which they stand, one at a time, and all R beside them.
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

from compiler.schedule.schedule import Schedule, ScheduleError
from runtime.contract.actions import Action, Step, actions_of, is_copy

# --- Runs the steps of ranks that wait for one another's events, one rank after another

Ticks = MutableSequence[int]
Links = Mapping[tuple[bool, int, bool], tuple[int, int, int]]  # by forward or not, stage, and whether in direction 1
# Of a step: its time, and of each of its two actions the event that it waits for, the one that it makes, and how much
# later this is where it is waited for.
Run = tuple[int, int, int, int, int, int, int]


def run_in_turn(rows: Sequence[Sequence[Run]], events: int, most: int) -> tuple[list[Ticks], list[Ticks]]:
    """Return the start and end times of the steps of each rank. A rank that waits forever has those of its first
    steps alone. `most`: an upper bound of all times."""
    done = [*_numbers(most, events), 0, -1]  # by event, when it is there; then what is at the start, and of nobody
    starts, ends = ([_numbers(most) for _ in rows] for _ in range(2))
    waiting: dict[int, list[int]] = {}  # what is not done -> ranks that wait for it
    runnable = deque(range(len(rows)))
    while runnable:
        rank = runnable.popleft()
        row, start, end = rows[rank], starts[rank], ends[rank]
        now = end[-1] if end else 0
        for k in range(len(end), len(row)):
            time, wants, makes, delay, wants_also, makes_also, delay_also = row[k]
            ready, ready_also = done[wants], done[wants_also]
            if ready < 0 or ready_also < 0:
                waiting.setdefault(wants if ready < 0 else wants_also, []).append(rank)
                break
            now = max(now, ready, ready_also)
            start.append(now)
            now += time
            end.append(now)
            done[makes], done[makes_also] = now + delay, now + delay_also
            if waiting:
                runnable.extend(waiting.pop(makes, ()))
                runnable.extend(waiting.pop(makes_also, ()))
    return starts, ends


def _numbers(most: int, count: int = 0) -> Ticks:
    """So many numbers, each -1, and room for more of up to `most`: eight bytes each where they fit."""
    return array("q", [-1]) * count if most < 2**63 else [-1] * count


# --- Runs ranks with their copies to the host and back: a lane each way beside each rank, and who waits for whom

EVENTS = 4  # of an activation that goes: its F has ended, it is on the host, its R is reached, it is back
_Key = tuple[int, int]  # a stage and a micro-batch
_Row = list[tuple[int, Run]]  # the step of each run, or -1


def run_with_copies(
    actions: Sequence[Sequence[Step]], rows: Sequence[Sequence[Run]], first: int, events: int, most: int
) -> tuple[list[Ticks], list[Ticks], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """When steps start and end, as `run_in_turn`, and of each rank's copies the step, the start and the end.

    `first`: of `events`, the first one that is of no stage; there are EVENTS for each O.
    """
    gone = [(a.stage, a.micro_batch) for steps in actions for a in steps if isinstance(a, Action) and a.kind == "O"]
    away = {key: first + EVENTS * number for number, key in enumerate(gone)}
    of_ranks = [_lanes(steps, row, away, events) for steps, row in zip(actions, rows, strict=True)]
    lanes = [lane for rank in of_ranks for lane in rank]
    starts, ends = run_in_turn([[run for _, run in lane] for lane in lanes], events, most)
    spans = [
        [(k, start, end) for (k, _), start, end in zip(*of_lane, strict=False) if k >= 0]
        for of_lane in zip(lanes, starts, ends, strict=True)
    ]
    compute = spans[::3]
    copies = tuple(tuple(sorted(out + back)) for out, back in zip(spans[1::3], spans[2::3], strict=True))
    return [[s for _, s, _ in each] for each in compute], [[e for _, _, e in each] for each in compute], copies


def _lanes(steps: Sequence[Step], row: Sequence[Run], away: dict[_Key, int], events: int) -> tuple[_Row, _Row, _Row]:
    """What a rank computes, copies to the host and copies back."""
    out: _Row = []
    back: _Row = []
    compute: _Row = []

    def run(time: int, wants: int = events, makes: int = events + 1) -> Run:
        return (time, wants, makes, 0, events, events + 1, 0)

    for k, (step, of_step) in enumerate(zip(steps, row, strict=True)):
        if isinstance(step, Action) and is_copy(step):
            event = away[step.stage, step.micro_batch]
            if step.kind == "O":
                out.append((k, run(of_step[0], event, event + 1)))
                compute.append((k, run(0, wants=event + 1)))
            else:
                back.append((k, run(of_step[0], event + 2, event + 3)))
                compute.append((k, run(0, makes=event + 2)))
            continue
        compute += [(-1, run(0, wants=event + 3)) for event in _events(step, "BI", away)]
        compute.append((k, of_step))
        compute += [(-1, run(0, makes=event)) for event in _events(step, "F", away)]
    return compute, out, back


def _events(step: Step, kinds: str, away: dict[_Key, int]) -> Iterator[int]:
    """The events of those of a step's actions that are of some kinds and whose activations go."""
    for action in actions_of(step):
        if action.kind in kinds and (event := away.get((action.stage, action.micro_batch))) is not None:
            yield event


# --- simulate


class Prices(Protocol):
    """What steps take: a table of costs by kinds and weights, or the times of a plan's own stages."""

    @property
    def micro_batches(self) -> Sequence[Fraction]:
        """Factors of what is done on each micro-batch; empty where all are alike."""

    @property
    def keeps(self) -> Fraction:
        """The share of an activation that is held from the end of its I to the end of its W."""

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another, that runs a stage next to one of its own."""

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """ValueError where they are those of other sizes."""

    def of(self, step: Step, rank: int) -> Fraction:
        """Time of a step on a pipeline rank."""


@dataclass(frozen=True)
class Timeline:
    """Per rank and step, its start and end in ticks of `unit`; times are in the unit of the costs.

    An O or R takes no time of its rank: it starts and ends when the rank goes on behind it.
    """

    starts: tuple[Sequence[int], ...]
    ends: tuple[Sequence[int], ...]
    unit: Fraction
    peak_activations: tuple[Fraction, ...]  # per rank, the most it holds
    copies: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # per rank, of each O and R its step, and start and end

    @cached_property
    def ticks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per rank and step, its start and end in ticks."""
        return tuple(tuple(zip(*rank, strict=True)) for rank in zip(self.starts, self.ends, strict=True))

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Fraction, Fraction], ...], ...]:
        """Per rank and step, its start and end."""
        return tuple(tuple((start * self.unit, end * self.unit) for start, end in rank) for rank in self.ticks)

    @cached_property
    def makespan(self) -> Fraction:
        """The end of the last step."""
        return max(rank[-1] for rank in self.ends if rank) * self.unit

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """Per rank, the time of the makespan in which it runs nothing."""
        busy = (sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))
        return tuple(self.makespan - time * self.unit for time in busy)


def simulate(schedule: Schedule, costs: Prices) -> Timeline:
    """Run a schedule that `check` accepts, in O(actions).

    Stage s on micro-batch m makes event 2(sN + m) forward and 2(sN + m) + 1 backward, be it by a B or an I.
    ScheduleError names rank and step where ranks wait for each other for ever; ValueError where the weights of the
    costs are not as many as the stages, ranks and micro-batches.
    """
    costs.check(schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches)
    messages = _messages(schedule, costs)
    unit, tables, places = _ticks(schedule, costs, messages.values())
    delays = {ends: int(time / unit) for ends, time in messages.items()}
    events = 2 * schedule.num_stages * schedule.num_micro_batches
    most = sum(max(table, default=0) * len(place) for table, place in zip(tables, places, strict=True))
    most += events * max(delays.values(), default=0)
    links = [_links(schedule, rank, delays) for rank in range(schedule.num_ranks)]
    copies: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    copied = EVENTS * sum(map(is_copy, chain(*schedule.actions))) // 2
    of_ranks = zip(schedule.actions, tables, places, links, strict=True)
    rows = [list(_runs(*each, schedule.turn, events + copied)) for each in of_ranks]
    if copied:
        starts, ends, copies = run_with_copies(schedule.actions, rows, events, events + copied, most)
    else:
        starts, ends = run_in_turn(rows, events, most)
    for rank, steps in enumerate(schedule.actions):
        if len(ends[rank]) < len(steps):
            raise ScheduleError(f"rank {rank}, {steps[len(ends[rank])]}: waits for ever, on ranks that wait for it")
    return Timeline(tuple(starts), tuple(ends), unit, held_at_most(schedule, costs.keeps), copies)


def has_copies(schedule: Schedule) -> bool:
    """Whether anything goes to the host and back."""
    return any(map(is_copy, chain(*schedule.actions)))


def _runs(
    steps: Sequence[Step], table: Sequence[int], place: Iterable[int], links: Links, turn: int, events: int
) -> Iterator[Run]:
    """The steps of a rank, as they are run."""
    for step, at in zip(steps, place, strict=True):
        run = [table[at]]
        for action in actions_of(step):
            if action.kind == "W":
                run += (events, events + 1, 0)
            else:
                wants, makes, delay = links[action.kind == "F", action.stage, action.micro_batch >= turn]
                run += (wants + 2 * action.micro_batch if wants >= 0 else events, makes + 2 * action.micro_batch, delay)
        time, wants, makes, delay, *other = run
        yield (time, wants, makes, delay, *(other or (events, events + 1, 0)))


def held_at_most(schedule: Schedule, keeps: Fraction) -> tuple[Fraction, ...]:
    """Per rank, the most activations that it holds, where an I frees all but a share of one and its W the rest."""
    return tuple(Fraction(peak, keeps.denominator) for peak in _peaks(schedule, keeps.denominator, keeps.numerator))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations alive: one more at the start of an F or R, one less at the end of its B, W or O.

    Where nothing runs backward (evaluation), a forward keeps nothing beyond its own end.
    """
    return _peaks(schedule, 1, 1)


def _peaks(schedule: Schedule, parts: int, kept: int) -> tuple[int, ...]:
    """Per rank, the most that it holds in parts of an activation, some of which are kept from an I to its W."""
    trains = any(action.kind != "F" for rank in schedule.actions for step in rank for action in actions_of(step))
    freed = {"F": 0, "R": 0, "O": parts, "B": parts, "I": parts - kept, "W": kept} if trains else {"F": parts}
    return tuple(_peak(steps, parts, freed) for steps in schedule.actions)


def _peak(steps: Sequence[Step], parts: int, freed: Mapping[str, int]) -> int:
    live = peak = 0
    for step in steps:
        kinds = [action.kind for action in actions_of(step)]
        live += parts * (kinds.count("F") + kinds.count("R"))
        if live > peak:
            peak = live
        for kind in kinds:
            live -= freed[kind]
    return peak


def _messages(schedule: Schedule, costs: Prices) -> dict[tuple[int, int], Fraction]:
    """The time of a message from a rank to another by both; 0 where a rank hands over to itself."""
    ends = set()
    for micro_batch in {0, schedule.num_micro_batches - 1}:  # one of each direction
        ranks = [schedule.rank_of(stage, micro_batch) for stage in range(schedule.num_stages)]
        ends |= {pair for a, b in pairwise(ranks) for pair in ((a, b), (b, a))}
    return {(a, b): costs.message(a, b) if a != b else Fraction(0) for a, b in ends}


def _ticks(
    schedule: Schedule, costs: Prices, messages: Iterable[Fraction]
) -> tuple[Fraction, list[list[int]], list[Sequence[int]]]:
    """A unit of which all times are whole multiples; per rank the times there are in it, and by step which it takes."""
    places: list[Sequence[int]] = []
    tables: list[list[Fraction]] = []
    by_micro_batch = bool(costs.micro_batches)
    for rank, steps in enumerate(schedule.actions):
        alike, place = _distinct(steps, by_micro_batch)
        tables.append([costs.of(step, rank) for step in alike])
        places.append(place)
    unit = Fraction(1, math.lcm(*(value.denominator for value in {*messages, *chain(*tables)})))
    return unit, [[int(time / unit) for time in table] for table in tables], places


def _distinct(steps: Sequence[Step], by_micro_batch: bool) -> tuple[list[Step], Sequence[int]]:
    """The steps that differ in what they do, one of each; by step, which of them it is like."""
    numbers: dict[tuple[object, ...], int] = {}
    alike: list[Step] = []
    place = array("L")
    for step in steps:
        key: tuple[object, ...] = actions_of(step)
        if not by_micro_batch:
            key = tuple([(action.kind, action.stage) for action in actions_of(step)])
        if key not in numbers:
            numbers[key] = len(alike)
            alike.append(step)
        place.append(numbers[key])
    return alike, place


def _links(schedule: Schedule, rank: int, delays: Mapping[tuple[int, int], int]) -> Links:
    """By what an action of a rank is, the event that it wants on micro-batch 0, or -1, the one that it makes, and how
    long the message of this one takes."""
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
