"""The time of a run, from its metrics and events: time in steps that were kept, and lost time by cause.

Time is counted from each start of the ranks to their last record, and from a failure to the automatic restart. The
time before a manual start is not counted.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from compiler.tools.report.long_metrics import Row, left_out


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds of a run. The parts sum to `wall`. `other` is the rest, such as validation and steps cut off."""

    wall: float
    steps: float  # in steps that were kept
    again: float  # in steps that were trained again after a failure or a resume
    checkpoint: float  # while a save blocked the ranks
    restart: float  # from the last step or save before a failure to the automatic restart
    lost_at: Mapping[int, float] = field(default_factory=dict)  # step → seconds lost to failures just before it

    @property
    def other(self) -> float:
        return self.wall - self.steps - self.again - self.checkpoint - self.restart

    @property
    def goodput(self) -> float:
        """The share of the time that was spent in steps that were kept."""
        return self.steps / self.wall


def lost_time(metrics: Sequence[Row], replaced: Sequence[Row], events: Sequence[Row]) -> LostTime | None:
    """Account for the time of a run. Returns None if the rows do not say how long it took.

    `metrics`: rows of metrics.jsonl; `replaced`: rows that a resume moved to other files; `events`: rows of
    events.jsonl.
    """
    wall, restart, failed = 0.0, 0.0, False
    lost_at: dict[int, float] = {}
    before_s = last_s = None  # times of the previous row, and of the last step, save or start
    for at_s, row in sorted(_rows_with_times(chain(metrics, replaced, events)), key=lambda timed_row: timed_row[0]):
        event = row.get("event")
        if before_s is not None and (event != "start" or failed):
            wall += at_s - before_s
        if event == "start" and failed and last_s is not None:
            restart += at_s - last_s
            lost_at[row["step"] + 1] = lost_at.get(row["step"] + 1, 0.0) + at_s - last_s
        failed = event == "restart" or (failed and event != "start")
        before_s, last_s = at_s, at_s if event in (None, "save", "start") else last_s
    if wall <= 0:
        return None
    for row in replaced:
        lost_at[row["step"]] = lost_at.get(row["step"], 0.0) + seconds_of_row(row)
    checkpoint = sum(seconds_of(row, "seconds") for row in events if row.get("event") == "save")
    steps, repeated = (sum(map(seconds_of_row, rows)) for rows in (metrics, replaced))
    return LostTime(wall, steps, repeated, checkpoint, restart, lost_at)


def _rows_with_times(rows: Iterable[Row]) -> Iterator[tuple[float, Row]]:
    """Yield rows with their times in seconds. Rows without a valid time are left out."""
    for row in rows:
        try:
            yield datetime.datetime.fromisoformat(row["time"]).timestamp(), row
        except (KeyError, TypeError, ValueError, OverflowError):
            continue


def seconds_of_row(row: Row) -> float:
    """Return the seconds of the step of a row, and of those that it stands for."""
    return seconds_of(row, "step_s") + seconds_of(left_out(row), "step_s")


def seconds_of(row: Row, key: str) -> float:
    """Return the seconds under `key`; 0 if there are none, or if they are out of range."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9 else 0.0
