"""Packing rows into sequences: best-fit decreasing, within windows of rows.

A row goes to the fullest sequence that has room for it (the oldest of equal ones), else it starts a new sequence. TRL
calls this `bfd`. It needs at most 11/9 of the optimal number of sequences, plus 4 (Johnson et al., "Worst-case
performance bounds for simple one-dimensional packing algorithms", 1974). Windows bound time and memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import chain

import numpy as np

from runtime.data.permutation import Numbers

WINDOW = 1 << 14  # rows


class Packs:
    """The rows of each sequence, in order."""

    def __init__(self, packs: Iterable[list[int]]) -> None:
        lists = list(packs)
        self._rows = np.fromiter(chain.from_iterable(lists), np.int64)
        self._ends = np.cumsum([len(pack) for pack in lists], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def rows(self, pack: int) -> Numbers:
        """Return the numbers of the rows of a sequence."""
        return self._rows[self._ends[pack - 1] if pack else 0 : self._ends[pack]]

    def rows_of(self, packs: Numbers) -> tuple[Numbers, Numbers]:
        """Return the concatenated rows of several sequences, and the number of rows of each."""
        counts = np.diff(self._ends, prepend=0)[packs]
        return self._rows[runs(self._ends[packs] - counts, counts)], counts


def runs(first: Numbers, counts: Numbers) -> Numbers:
    """Concatenate the ranges [first, first + count)."""
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def sums(values: Numbers, counts: Numbers) -> Numbers:
    """Return the sums of consecutive runs of values. Each run has at least one value."""
    return np.asarray(np.add.reduceat(values, np.cumsum(counts) - counts))


def pack_rows(rows: Numbers, sizes: Numbers, room: int) -> Packs:
    """Pack rows into sequences of `room` tokens. `sizes`: tokens of each row, at most `room`."""
    windows = ((rows[first : first + WINDOW], sizes[first : first + WINDOW]) for first in range(0, len(rows), WINDOW))
    return Packs(chain.from_iterable(_best_fit(*window, room) for window in windows))


def _best_fit(rows: Numbers, sizes: Numbers, room: int) -> list[list[int]]:
    packs: list[list[int]] = []
    packs_by_room: dict[int, deque[list[int]]] = {}  # by remaining room, the oldest first
    rooms: list[int] = []  # keys of `packs_by_room`, ascending
    for place in np.argsort(-sizes, kind="stable").tolist():
        size, row = int(sizes[place]), int(rows[place])
        index = bisect_left(rooms, size)
        if index < len(rooms):
            space = rooms[index]
            pack = packs_by_room[space].popleft()
            if not packs_by_room[space]:
                del packs_by_room[space], rooms[index]
        else:
            space, pack = room, []
            packs.append(pack)
        pack.append(row)
        if remaining := space - size:
            if remaining not in packs_by_room:
                packs_by_room[remaining] = deque()
                insort(rooms, remaining)
            packs_by_room[remaining].append(pack)
    return packs
