"""What is known of a run from its rows and events: the fold that every view and exporter shows."""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from runtime.build.run_copy import WATCH
from runtime.contract import WatchFacts
from runtime.launch.run_lock import LOCK
from runtime.observe.watch.follow import FollowedItem
from runtime.system.regular_files import read_bytes
from runtime.system.strict_json import FormError

WINDOW = 32  # steps that pace and shares of the time are of
MOST_FORECAST_BYTES = 1 << 20
FAILING = "copy_failed"
OF_A_STEP = "gradients"  # traffic that does not grow with the batch


class RunState:
    """The run in the folder `run` after the items that were taken. Numbers that nobody has said are None.

    `since`: when the start began whose steps are counted; "": those of all starts."""

    def __init__(self, run: Path, forecast: WatchFacts | None = None, since: str = "") -> None:
        self.run, self.forecast, self.since = run, forecast, since
        self.start: Mapping[str, Any] = {}  # the last event of this kind
        self.row: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] | None = None  # of the last start
        self.save: Mapping[str, Any] | None = None  # the newest
        self.validation: tuple[int, float] | None = None  # step and loss of the last
        self.window: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self.counts: Counter[str] = Counter()  # of events, by name
        # Over all steps that are counted, given-up ones too:
        self.spent_s: Counter[str] = Counter()  # seconds by parts
        self.trained_tokens = 0
        self.link_bytes: Counter[tuple[str, str]] = Counter()  # by level and purpose, as planned

    def take(self, item: FollowedItem) -> None:
        """Know one thing more."""
        if item.kind == "row":
            self._take_row(item)
        elif item.kind == "event":
            self._take_event(item.fields)
        else:
            self.window.clear()
            if self.validation and self.validation[0] > item.step:
                self.validation = None

    def _take_row(self, item: FollowedItem) -> None:
        self.row = row = item.fields
        self.window.append(row)
        if (loss := _float(row.get("validation_loss"))) is not None:
            self.validation = row["step"], loss
        if item.time >= self.since:
            self._count(row)

    def _count(self, row: Mapping[str, Any]) -> None:
        self.spent_s.update(parts_of(row))
        tokens = round((_float(row.get("tokens_per_s")) or 0.0) * (_float(row.get("step_s")) or 0.0))
        self.trained_tokens += tokens
        if (forecast := self.forecast) is None:
            return
        for link in forecast.links:
            share = 1.0 if link.purpose == OF_A_STEP else tokens / forecast.tokens  # a growing batch begins small
            self.link_bytes[link.level, link.purpose] += round(share * link.bytes)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        self.counts[name] += 1
        if name == "start":
            self.start, self.end = event, None
            self.window.clear()
            self.forecast = read_forecast(self.run) or self.forecast
        elif name == "end":
            self.end = event
        elif name == "save":
            self.save = event

    # ---- what follows

    @property
    def last_step(self) -> int | None:
        """The step with which the run, or its phase, ends."""
        last = self.start.get("last_step")
        return last if isinstance(last, int) else None

    def number(self, name: str) -> float | None:
        """A number of the last row; NaN where it is not finite."""
        if name in self.row and self.row[name] is None:
            return math.nan
        return _float(self.row.get(name))

    @property
    def mfu(self) -> float | None:
        """Share of the BF16 peak of all devices that the last step trained with."""
        speed, forecast = self.number("tokens_per_s"), self.forecast
        if speed is None or forecast is None or not forecast.peak_flops:
            return None
        return speed * forecast.flops_per_token / forecast.peak_flops

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of the time of each part over the last steps; empty where no row says it."""
        total: Counter[str] = Counter()
        for row in self.window:
            total.update(parts_of(row))
        whole = sum(total.values())
        return {part: seconds / whole for part, seconds in total.items()} if whole else {}

    @property
    def layers(self) -> Mapping[str, float]:
        """Tokens of the busiest expert over the mean, by layer."""
        found = self.row.get("layer_imbalance")
        found = found if isinstance(found, dict) else {}
        return {name: ratio for name, each in found.items() if (ratio := _float(each)) is not None}

    @property
    def failing(self) -> Mapping[str, Any]:
        """Places that checkpoints cannot be copied to now, with the step since which."""
        found = self.row.get(FAILING)
        return found if isinstance(found, dict) else {}

    @property
    def pace_s(self) -> float | None:
        """Seconds of a step, saves and validations included, over the last steps."""
        if len(self.window) < 2:
            return None
        first, last = seconds_of(self.window[0].get("time")), seconds_of(self.window[-1].get("time"))
        steps = self.window[-1]["step"] - self.window[0]["step"]
        return (last - first) / steps if first is not None and last is not None and steps > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at this pace."""
        if self.pace_s is None or self.last_step is None:
            return None
        return self.pace_s * max(0, self.last_step - self.row["step"])

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, and no further phase of it follows by itself."""
        if self.end is None:
            return False
        more = self.forecast is not None and self.forecast.phase < self.forecast.phases
        return not (more and self.end.get("outcome") == "finished")


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a row by parts (runtime/step/step_time.py)."""
    found = row.get("spent_s")
    found = found if isinstance(found, dict) else {}
    return {part: seconds for part, each in found.items() if (seconds := _float(each)) is not None}


def read_forecast(run: Path) -> WatchFacts | None:
    """What is predicted of the run in a folder; None where that is not there, or is of another version."""
    with suppress(OSError, FormError, ValueError):
        return WatchFacts.from_json(read_bytes(run / WATCH, MOST_FORECAST_BYTES))
    return None


def seconds_of(time: Any) -> float | None:
    """Seconds since 1970 of a time of ISO 8601."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- Whether a run is running, as far as its folder shows it


def is_held(run: Path) -> bool:
    """Whether a process holds the lock of the run folder. False where there is none, or where locks of another machine
    are not seen."""
    try:
        lock = os.open(run / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once; a start waits for longer than that
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
