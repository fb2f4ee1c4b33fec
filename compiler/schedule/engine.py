"""Runs the steps of ranks that wait for one another's events, one rank after another: the engine behind `simulate`.

`compiler/schedule/rounds.py` runs the steps of many ranks at once, with the same results.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, MutableSequence, Sequence

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
