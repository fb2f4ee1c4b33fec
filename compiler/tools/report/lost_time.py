"""Where the time of a run went, as its rows and events say it: steps that stay, and what was lost by cause.

The time of a run is that from each start of its ranks to the last that is known of them, and from a failure to the
start that followed by itself. Between two starts by hand nothing is counted.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LostTime:
    """Seconds of a run. The parts sum to `wall`: `other` is the rest, such as validation and what a kill cut off."""

    wall: float
    steps: float  # of training whose rows stay
    again: float  # of steps that were trained again behind a failure or a resume
    checkpoint: float  # for which saves kept the ranks
    restart: float  # from the last step or save before a failure to the start that followed by itself
    at: Mapping[int, float] = field(default_factory=dict)  # step → seconds that were lost in front of it by failures

    @property
    def other(self) -> float:
        return self.wall - self.steps - self.again - self.checkpoint - self.restart

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were trained that stay."""
        return self.steps / self.wall


def lost_time(kept: Sequence[Row], replaced: Sequence[Row], events: Sequence[Row]) -> LostTime | None:
    """`kept`, `replaced`: rows of metrics.jsonl, and of the files beside it that a resume has moved them to. `events`:
    of events.jsonl. None where these do not say how long a run took."""
    wall, restart, failed = 0.0, 0.0, False
    lost_at: dict[int, float] = {}
    before_s = last_s = None  # what was known before, and the last step or save among it
    for at_s, row in sorted(_timed(chain(kept, replaced, events)), key=lambda each: each[0]):
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
        lost_at[row["step"]] = lost_at.get(row["step"], 0.0) + seconds_of(row, "step_s")
    checkpoint = sum(seconds_of(row, "seconds") for row in events if row.get("event") == "save")
    steps, again = (sum(seconds_of(row, "step_s") for row in rows) for rows in (kept, replaced))
    return LostTime(wall, steps, again, checkpoint, restart, lost_at)


def _timed(rows: Iterable[Row]) -> Iterator[tuple[float, Row]]:
    """Rows with their times in seconds, but for those that have none."""
    for row in rows:
        try:
            yield datetime.datetime.fromisoformat(row["time"]).timestamp(), row
        except (KeyError, TypeError, ValueError, OverflowError):
            continue


def seconds_of(row: Row, key: str) -> float:
    """A time of a row; 0 where it has none, or none that can be."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9 else 0.0
