"""Runs schedules that are kept as numbers: of many ranks in rounds, in each of which all ranks try their next step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compiler.schedule.engine import Links, Ticks, run_in_turn
from compiler.schedule.steps import F, LazySteps, W

_WIDE = 48  # ranks of which a round takes less than their steps one by one
_Numbers = NDArray[np.int64]


def run_in_numbers(
    actions: Sequence[LazySteps],
    tables: Sequence[Sequence[int]],
    places: Sequence[Sequence[int]],
    links: Sequence[Links],
    turn: int,
    events: int,
) -> tuple[list[Ticks], list[Ticks]]:
    """When the steps of each rank start and end, as far as they come (simulate.py)."""
    rows = []
    for steps, table, place, links_of_rank in zip(actions, tables, places, links, strict=True):
        rows.append([np.array(table, np.int64)[place], *_waits(steps, links_of_rank, turn, events)])
    if len(actions) >= _WIDE:
        return _in_rounds(rows, events)
    return run_in_turn([list(zip(*(column.tolist() for column in row), strict=True)) for row in rows], events, 0)


def _waits(steps: LazySteps, links: Links, turn: int, events: int) -> list[_Numbers]:
    """By step, of both its actions: the event that it waits for, the one that it makes, and the time of its message."""
    kinds, stages, batches = steps.kinds, steps.stages, steps.micro_batches.astype(np.int64)
    wants = np.full((len(steps), 2), events)
    makes, delays = wants + 1, np.zeros_like(wants)
    for (forward, stage, late), (wanted, made, delay) in links.items():
        here = np.nonzero(((kinds == F) == forward) & (kinds != W) & (stages == stage) & ((batches >= turn) == late))
        makes[here] = made + 2 * batches[here]
        delays[here] = delay
        if wanted >= 0:
            wants[here] = wanted + 2 * batches[here]
    return [each[:, k] for k in (0, 1) for each in (wants, makes, delays)]


def _in_rounds(rows: Sequence[Sequence[_Numbers]], events: int) -> tuple[list[Ticks], list[Ticks]]:
    """Steps of all ranks end to end, each rank with one more behind its last, which waits for what is never there."""
    behind = [np.array([each]) for each in (0, *(events + 2, events + 1, 0) * 2)]
    columns = [np.concatenate([part for row in rows for part in (row[k], behind[k])]) for k in range(len(behind))]
    times, *sides = columns
    paired = bool((sides[3] != events).any() | (sides[4] != events + 1).any())
    (wants, makes, delays), (wants_also, makes_also, delays_also) = sides[:3], sides[3:]
    first = np.cumsum([0, *(len(row[0]) + 1 for row in rows)])[:-1]
    done = np.full(events + 3, -1)
    done[events] = 0
    starts, ends = np.zeros_like(times), np.zeros_like(times)
    at, now = first.copy(), np.zeros(len(rows), np.int64)
    while True:
        ready = done[wants[at]]
        if paired:
            also = done[wants_also[at]]
            ready = np.where(np.minimum(ready, also) < 0, -1, np.maximum(ready, also))
        runs = np.flatnonzero(ready >= 0)
        if not len(runs):
            break
        steps = at[runs]
        start = np.maximum(now[runs], ready[runs])
        end = start + times[steps]
        starts[steps], ends[steps], now[runs] = start, end, end
        done[makes[steps]] = end + delays[steps]
        if paired:
            done[makes_also[steps]] = end + delays_also[steps]
        done[events + 1] = -1
        at[runs] += 1
    return _by_rank(starts, first, at), _by_rank(ends, first, at)


def _by_rank(times: _Numbers, first: _Numbers, last: _Numbers) -> list[Ticks]:
    return [array("q", times[begin:end].tobytes()) for begin, end in zip(first, last, strict=True)]
