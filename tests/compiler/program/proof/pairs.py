"""Schedules with pairs of any two independent actions, not only of a forward and a backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from compiler.schedule.costs import Costs
from compiler.schedule.schedule import Schedule, ScheduleError, depends
from compiler.schedule.simulate import simulate
from runtime.contract.actions import Action, Pair, Step, actions_of


def paired(schedule: Schedule) -> Schedule:
    """The schedule with adjacent single actions paired, from the front of each rank, if no rank then waits forever."""
    for rank in range(schedule.num_ranks):
        index = 0
        while index + 1 < len(schedule.actions[rank]):
            schedule, index = _merged(schedule, rank, index), index + 1
    schedule.check()
    return schedule


def kinds_of_pairs(schedule: Schedule) -> Counter[str]:
    """How often each pair of kinds is overlapped: FF, FW, IW, …"""
    pairs = [actions_of(step) for row in schedule.actions for step in row if isinstance(step, Pair)]
    return Counter("".join(sorted(action.kind for action in pair)) for pair in pairs)


def _merged(schedule: Schedule, rank: int, at: int) -> Schedule:
    row = schedule.actions[rank]
    first, second = row[at], row[at + 1]
    if not (isinstance(first, Action) and isinstance(second, Action)) or depends(second, first):
        return schedule
    pair: tuple[Step, ...] = (*row[:at], Pair(first, second), *row[at + 2 :])
    changed = replace(schedule, actions=(*schedule.actions[:rank], pair, *schedule.actions[rank + 1 :]))
    try:
        simulate(changed, Costs())
    except ScheduleError:
        return schedule
    return changed
