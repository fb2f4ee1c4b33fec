"""Runs a schedule against a table of costs, exactly: when each step starts and ends, and who waits.

Ranks do their steps in order; a step starts when its rank is free and what its actions need from other stages is
there. A message to another rank takes its time and occupies nobody.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from compiler.schedules.schedule import Schedule, ScheduleError
from runtime.actions import Step, actions_of


class Prices(Protocol):
    """What steps take: a table of costs by kinds and weights, or the times of a plan's own stages."""

    @property
    def micro_batches(self) -> Sequence[Fraction]:
        """Factors of what is done on each micro-batch; empty where all are alike."""

    def message(self, source: int, target: int) -> Fraction:
        """Time of a message from a pipeline rank to another, that runs a stage next to one of its own."""

    def check(self, num_ranks: int, num_stages: int, num_micro_batches: int | None = None) -> None:
        """ValueError where they are those of other sizes."""

    def of(self, step: Step, rank: int) -> Fraction:
        """Time of a step on a pipeline rank."""


@dataclass(frozen=True)
class Timeline:
    """Per rank and step, its start and end in ticks of `unit`; times are in the unit of the costs."""

    ticks: tuple[tuple[tuple[int, int], ...], ...]
    unit: Fraction
    peak_activations: tuple[int, ...]  # per rank, the most it holds

    @cached_property
    def spans(self) -> tuple[tuple[tuple[Fraction, Fraction], ...], ...]:
        """Per rank and step, its start and end."""
        return tuple(tuple((start * self.unit, end * self.unit) for start, end in rank) for rank in self.ticks)

    @cached_property
    def makespan(self) -> Fraction:
        """The end of the last step."""
        return max(rank[-1][1] for rank in self.ticks if rank) * self.unit

    @cached_property
    def idle(self) -> tuple[Fraction, ...]:
        """Per rank, the time of the makespan in which it runs nothing."""
        return tuple(self.makespan - sum(end - start for start, end in rank) * self.unit for rank in self.ticks)


def simulate(schedule: Schedule, costs: Prices) -> Timeline:
    """Run a schedule that `check` accepts, in O(actions).

    ScheduleError names rank and step where ranks wait for each other for ever; ValueError where the weights of the
    costs are not as many as the stages, ranks and micro-batches.
    """
    costs.check(schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches)
    messages = _messages(schedule, costs)
    unit, times = _ticks(schedule, costs, messages.values())
    delays = {ends: int(time / unit) for ends, time in messages.items()}
    needs = [_needs(schedule, rank, delays) for rank in range(schedule.num_ranks)]
    ends: dict[int, int] = {}  # what `_needs` numbers -> tick at which it is done
    ticks: list[list[tuple[int, int]]] = [[] for _ in schedule.actions]
    waiting: dict[int, list[int]] = {}  # what is not done -> ranks that wait for it
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        done, time, need = ticks[rank], times[rank], needs[rank]
        now = done[-1][1] if done else 0
        for k in range(len(done), len(time)):
            makes, wants = need[k]
            missing = next((one for one, _ in wants if one not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max([now, *(ends[one] + delay for one, delay in wants)])
            now = start + time[k]
            done.append((start, now))
            for one in makes:
                ends[one] = now
                runnable.extend(waiting.pop(one, ()))
    for rank, steps in enumerate(schedule.actions):
        if len(ticks[rank]) < len(steps):
            raise ScheduleError(f"rank {rank}, {steps[len(ticks[rank])]}: waits for ever, on ranks that wait for it")
    return Timeline(tuple(map(tuple, ticks)), unit, peak_activations(schedule))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations alive: one more at the start of an F, one less at the end of its B or W.

    Where nothing runs backward (evaluation), a forward keeps nothing beyond its own end.
    """
    kinds = [[tuple([action.kind for action in actions_of(step)]) for step in steps] for steps in schedule.actions]
    backward = {kind for rank in kinds for step in set(rank) for kind in step} - {"F"}
    peaks = []
    for rank in kinds:
        changes = {
            step: (step.count("F"), sum(kind in ("BW" if backward else "F") for kind in step)) for step in set(rank)
        }
        live = peak = 0
        for step in rank:
            starts, ends = changes[step]
            live += starts
            if live > peak:
                peak = live
            live -= ends
        peaks.append(peak)
    return tuple(peaks)


def _messages(schedule: Schedule, costs: Prices) -> dict[tuple[int, int], Fraction]:
    """The time of a message from a rank to another by both; 0 where a rank hands over to itself."""
    ends = set()
    for micro_batch in {0, schedule.num_micro_batches - 1}:  # one of each direction
        ranks = [schedule.rank_of(stage, micro_batch) for stage in range(schedule.num_stages)]
        ends |= {pair for a, b in pairwise(ranks) for pair in ((a, b), (b, a))}
    return {(a, b): costs.message(a, b) if a != b else Fraction(0) for a, b in ends}


def _ticks(schedule: Schedule, costs: Prices, messages: Iterable[Fraction]) -> tuple[Fraction, list[list[int]]]:
    """A unit of which all times are whole multiples, and per rank the steps' times in it."""
    kinds: list[dict[tuple[object, ...], Fraction]] = [{} for _ in schedule.actions]
    keys: list[list[tuple[object, ...]]] = []
    for rank, steps in enumerate(schedule.actions):
        if costs.micro_batches:
            keys.append([actions_of(step) for step in steps])
        else:
            keys.append([tuple((action.kind, action.stage) for action in actions_of(step)) for step in steps])
        for key, step in zip(keys[rank], steps, strict=True):
            if key not in kinds[rank]:
                kinds[rank][key] = costs.of(step, rank)
    values = {*messages, *(time for table in kinds for time in table.values())}
    unit = Fraction(1, math.lcm(*(value.denominator for value in values)))
    tables = [{key: int(time / unit) for key, time in table.items()} for table in kinds]
    return unit, [[table[key] for key in row] for table, row in zip(tables, keys, strict=True)]


def _needs(
    schedule: Schedule, rank: int, delays: Mapping[tuple[int, int], int]
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Per step of a rank: the numbers of what it makes, and of what it needs from other stages with the delay of each.

    Stage s on micro-batch m makes 2(sN + m) forward and 2(sN + m) + 1 backward, be it by a B or an I.
    """
    N, last_stage = schedule.num_micro_batches, schedule.num_stages - 1
    result = []
    for step in schedule.actions[rank]:
        makes: list[int] = []
        wants: list[tuple[int, int]] = []
        for action in actions_of(step):
            stage, micro_batch = action.stage, action.micro_batch
            if action.kind == "W":
                continue
            backward = action.kind != "F"
            makes.append(2 * (stage * N + micro_batch) + backward)
            before = stage + 1 if backward else stage - 1
            if 0 <= before <= last_stage:
                source = schedule.rank_of(before, micro_batch)
                wants.append((2 * (before * N + micro_batch) + backward, delays[source, rank]))
        result.append((makes, wants))
    return result
