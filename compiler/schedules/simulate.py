"""Runs a schedule against a table of costs, in exact rationals: when each step starts and ends, and who waits.

Ranks do their steps in order; a step starts when its rank is free and what its actions need from other ranks is
there. Communication is free but for `latency`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from fractions import Fraction

from compiler.schedules.placement import num_stages
from compiler.schedules.schedule import Schedule, ScheduleError
from runtime.actions import Action, Step, actions_of


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action; `pair` is that of an overlapped F and B (None: F + B, no gain).

    Pairs of other kinds take the sum of their two actions. B = None means I + W.
    """

    F: Fraction = Fraction(1)
    I: Fraction = Fraction(1)
    W: Fraction = Fraction(1)
    B: Fraction | None = None
    pair: Fraction | None = None
    latency: Fraction = Fraction(0)

    def of(self, step: Step) -> Fraction:
        """Time of a step."""
        kinds = sorted(action.kind for action in actions_of(step))
        if kinds == ["B", "F"] and self.pair is not None:
            return self.pair
        backward = self.I + self.W if self.B is None else self.B
        one = {"F": self.F, "I": self.I, "W": self.W, "B": backward}
        return sum((one[kind] for kind in kinds), Fraction(0))


@dataclass(frozen=True)
class Timeline:
    """Per rank and step, its start and end; total time, idle time per rank, and the most activations a rank holds."""

    spans: tuple[tuple[tuple[Fraction, Fraction], ...], ...]
    makespan: Fraction
    idle: tuple[Fraction, ...]
    peak_activations: tuple[int, ...]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run a schedule that `check` accepts, in O(actions).

    ScheduleError names rank and step where ranks wait for each other for ever.
    """
    ends: dict[Action, Fraction] = {}
    spans: list[list[tuple[Fraction, Fraction]]] = [[] for _ in schedule.actions]
    waiting: dict[Action, list[int]] = {}  # action not yet run -> ranks that wait for it
    runnable = deque(range(schedule.num_ranks))
    last_stage = num_stages(schedule.placement, schedule.num_ranks) - 1
    while runnable:
        rank = runnable.popleft()
        steps = schedule.actions[rank]
        while len(spans[rank]) < len(steps):
            step = steps[len(spans[rank])]
            needs = [need for need in (_needs(action, last_stage) for action in actions_of(step)) if need]
            missing = next((need for need in needs if not any(action in ends for action in need)), None)
            if missing is not None:
                for action in missing:
                    waiting.setdefault(action, []).append(rank)
                break
            arrivals = [ends[action] + costs.latency for need in needs for action in need if action in ends]
            start = max([spans[rank][-1][1] if spans[rank] else Fraction(0), *arrivals])
            spans[rank].append((start, start + costs.of(step)))
            for action in actions_of(step):
                ends[action] = spans[rank][-1][1]
                runnable.extend(waiting.pop(action, ()))
    for rank, steps in enumerate(schedule.actions):
        if len(spans[rank]) < len(steps):
            raise ScheduleError(f"rank {rank}, {steps[len(spans[rank])]}: waits for ever, on ranks that wait for it")
    makespan = max(span[-1][1] for span in spans if span)
    idle = tuple(makespan - sum((end - start for start, end in span), Fraction(0)) for span in spans)
    return Timeline(tuple(map(tuple, spans)), makespan, idle, peak_activations(schedule))


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most activations alive: one more at the start of an F, one less at the end of its B or W.

    Where nothing runs backward (evaluation), a forward keeps nothing beyond its own end.
    """
    kinds = {action.kind for steps in schedule.actions for step in steps for action in actions_of(step)}
    ends = "BW" if kinds - {"F"} else "F"
    peaks = []
    for steps in schedule.actions:
        live = peak = 0
        for step in steps:
            live += sum(action.kind == "F" for action in actions_of(step))
            peak = max(peak, live)
            live -= sum(action.kind in ends for action in actions_of(step))
        peaks.append(peak)
    return tuple(peaks)


def _needs(action: Action, last_stage: int) -> tuple[Action, ...]:
    """What must have come from the neighbouring stage: any one of these (a backward there is a B or an I)."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F" and stage > 0:
        return (Action("F", stage - 1, micro_batch),)
    if action.kind in "BI" and stage < last_stage:
        return (Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch))
    return ()
