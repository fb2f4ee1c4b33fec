"""Follows the files of a run: rows of metrics.jsonl and events, also from another process or machine.

    follower = Follower(run)
    for item in follower.poll(): …

A resume moves rows of later steps out of the file and retrains these steps: the first of them follows a `rewind`.
"""

from __future__ import annotations

import heapq
import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from runtime.observe import events, metrics
from runtime.system.regular_files import open_regular

_PIECE_BYTES = 16 << 20  # per read
_TAIL_BYTES = 1 << 10  # that identify a file: at least a row, with its time
RECENT_BYTES = 1 << 20  # of the last rows: at least a thousand
_SEARCHED_BYTES = 64 << 20  # before them, for the last validation: some 100,000 rows


class FollowedItem(NamedTuple):
    """A row of the metrics, an event, or a rewind: steps after `fields["step"]` are discarded."""

    kind: Literal["row", "event", "rewind"]
    fields: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Its step; 0 for an event without one."""
        step = self.fields.get("step")
        return step if isinstance(step, int) else 0

    @property
    def time(self) -> str:
        """When it was written, ISO 8601 in UTC; "" if unknown."""
        time = self.fields.get("time")
        return time if isinstance(time, str) else ""


class Follower:
    """Reads the folder of a run, which may not exist yet. What cannot be read now is read later."""

    def __init__(self, run: Path) -> None:
        self._rows, self._events = _FollowedFile(run / metrics.FILE), _FollowedFile(run / events.FILE)
        self._steps, self._times = array("q"), array("q")  # of the valid rows: 16 bytes per row

    @classmethod
    def of_recent(cls, run: Path) -> Follower:
        """A follower that begins with the last rows and the last validation, for views that show the present: the rows
        of a long run take seconds to read."""
        follower = cls(run)
        follower._rows = _FollowedFile(run / metrics.FILE, recent=b'"validation_loss"')
        return follower

    def poll(self) -> list[FollowedItem]:
        """Return new items since the last call, merged by time: rows and events, each in the order of their file."""
        events = [FollowedItem("event", event) for event in self._events.read() if isinstance(event.get("event"), str)]
        # Rows are read after events, so none is missing before an `end`.
        rows = [item for row in self._rows.read() for item in self._new_rows(row)]
        return [*heapq.merge(rows, events, key=lambda item: item.time)]

    def _new_rows(self, row: Mapping[str, Any]) -> Iterator[FollowedItem]:
        """Yield the row, unless it is known already because the file was rewritten."""
        step, time = row.get("step"), row.get("time", "")
        if type(step) is not int or not 0 <= step < 2**63 or not isinstance(time, str):  # no run writes such a row
            return
        number = hash(time)
        place = bisect_left(self._steps, step)
        if place < len(self._steps):
            if self._steps[place] == step and self._times[place] == number:
                return
            del self._steps[place:], self._times[place:]
            yield FollowedItem("rewind", {"step": step - 1, "time": time})
        self._steps.append(step)
        self._times.append(number)
        yield FollowedItem("row", row)


class _FollowedFile:
    """A file of JSON lines that other processes append to, or replace by a shorter one.

    `recent`: leave out all but the last lines, and the last one before them that has this word; None: read all.
    """

    def __init__(self, path: Path, recent: bytes | None = None) -> None:
        self._path, self._recent = path, recent
        self._offset, self._tail = 0, b""  # bytes before the offset, which identify the file

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the objects of new whole lines; of a replaced file from its beginning."""
        try:
            with os.fdopen(open_regular(self._path, os.O_RDONLY, follow=True), "rb") as file:
                file.seek(self._offset - len(self._tail))
                if not self._offset or file.read(len(self._tail)) != self._tail:  # the inode may have been reused
                    self._offset, self._tail = 0, b""
                    if self._recent is not None:
                        yield from self._skip_to_recent(file, self._recent)
                    file.seek(self._offset)
                while data := file.read(_PIECE_BYTES):
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) < _PIECE_BYTES:
                        return  # half a line
                    end = end or len(data)  # an overlong line, which no run writes
                    self._offset, self._tail = self._offset + end, data[max(0, end - _TAIL_BYTES) : end]
                    file.seek(self._offset)
                    yield from _objects(data[:end])
        except OSError:  # missing or unreadable at the moment
            return

    def _skip_to_recent(self, file: BinaryIO, word: bytes) -> Iterator[Mapping[str, Any]]:
        """Move the offset to the last lines. Yields the last object before them whose line has the word."""
        size = os.fstat(file.fileno()).st_size
        if size <= RECENT_BYTES:
            return
        file.seek(max(0, size - RECENT_BYTES - _SEARCHED_BYTES))
        skipped = file.read(size - RECENT_BYTES - file.tell())
        skipped += file.readline()
        if not skipped.endswith(b"\n"):  # an overlong line, which no run writes
            return
        self._offset, self._tail = file.tell(), skipped[-_TAIL_BYTES:]
        if (place := skipped.rfind(word)) >= 0:
            yield from _objects(skipped[skipped.rfind(b"\n", 0, place) + 1 : skipped.index(b"\n", place)])


def _objects(data: bytes) -> Iterator[Mapping[str, Any]]:
    for line in data.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # a damaged line
            continue
        if isinstance(value, dict):
            yield value
