"""Packing: which rows share a sequence. Best fit, the longest first, within windows of rows.

A row goes to the fullest sequence that has room for it, of several to the one that was begun first, else it begins one:
what TRL calls `bfd`. There are at most 11/9 as many sequences as there must be, and 4 more (Johnson et al., "Worst-case
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
    """Rows by the sequence that they share, in the order in which they are there."""

    def __init__(self, packs: Iterable[list[int]]) -> None:
        found = list(packs)
        self._rows = np.fromiter(chain.from_iterable(found), np.int64)
        self._ends = np.cumsum([len(each) for each in found], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def rows(self, pack: int) -> Numbers:
        """The rows of a sequence, by their numbers."""
        return self._rows[self._ends[pack - 1] if pack else 0 : self._ends[pack]]

    def rows_of(self, packs: Numbers) -> tuple[Numbers, Numbers]:
        """The rows of several sequences, one after the other, and how many each has."""
        counts = np.diff(self._ends, prepend=0)[packs]
        return self._rows[runs(self._ends[packs] - counts, counts)], counts


def runs(first: Numbers, counts: Numbers) -> Numbers:
    """So many numbers from each first one on, one run after the other."""
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def sums(values: Numbers, counts: Numbers) -> Numbers:
    """The sums of runs of so many values each, at least one."""
    return np.asarray(np.add.reduceat(values, np.cumsum(counts) - counts))


def packed(rows: Numbers, sizes: Numbers, room: int) -> Packs:
    """The rows, of so many tokens each, in sequences of `room` tokens. A row has `room` tokens at most."""
    windows = ((rows[first : first + WINDOW], sizes[first : first + WINDOW]) for first in range(0, len(rows), WINDOW))
    return Packs(chain.from_iterable(_best_fit(*window, room) for window in windows))


def _best_fit(rows: Numbers, sizes: Numbers, room: int) -> list[list[int]]:
    packs: list[list[int]] = []
    left: dict[int, deque[list[int]]] = {}  # by the room that is left, the first begun in front
    rooms: list[int] = []  # keys of `left`, ascending
    for place in np.argsort(-sizes, kind="stable").tolist():
        size, row = int(sizes[place]), int(rows[place])
        at = bisect_left(rooms, size)
        if at < len(rooms):
            space = rooms[at]
            pack = left[space].popleft()
            if not left[space]:
                del left[space], rooms[at]
        else:
            space, pack = room, []
            packs.append(pack)
        pack.append(row)
        if rest := space - size:
            if rest not in left:
                left[rest] = deque()
                insort(rooms, rest)
            left[rest].append(pack)
    return packs
