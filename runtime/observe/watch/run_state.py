"""The state of a run, folded from its rows and events. Views and exporters show it."""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from runtime.build.run_copy import WATCH
from runtime.contract import WatchFacts
from runtime.launch.run_lock import LOCK
from runtime.observe.watch.follow import FollowedItem
from runtime.system.regular_files import read_bytes
from runtime.system.strict_json import FormError

WINDOW = 32  # steps for the pace and the shares of time
MOST_FORECAST_BYTES = 1 << 20
FAILING = "copy_failed"
OF_A_STEP = "gradients"  # traffic that is independent of the batch size


class ValidationPoint(NamedTuple):
    """The validation loss after a step, in nats."""

    step: int
    loss: float


class RunState:
    """The state of the run in the folder `run` after all items so far. Unknown numbers are None.

    `since`: only steps after this time are counted; "" for all."""

    def __init__(self, run: Path, forecast: WatchFacts | None = None, since: str = "") -> None:
        self.run, self.forecast, self.since = run, forecast, since
        self.start: Mapping[str, Any] = {}  # the last such event
        self.row: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] | None = None  # the end of the last start
        self.save: Mapping[str, Any] | None = None  # the newest
        self.validation: ValidationPoint | None = None  # the last one
        self.window: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self.counts: Counter[str] = Counter()  # of events, by name
        self.stragglers: dict[int, Mapping[str, Any]] = {}  # the slow ranks at present
        self.devices: dict[Any, Mapping[str, Any]] = {}  # the last event `device` of each rank
        # Over all counted steps, including discarded ones:
        self.spent_s: Counter[str] = Counter()  # seconds by parts
        self.trained_tokens = 0
        self.link_bytes: Counter[tuple[str, str]] = Counter()  # by level and purpose, as planned

    def take(self, item: FollowedItem) -> None:
        """Update the state with one item."""
        if item.kind == "row":
            self._take_row(item)
        elif item.kind == "event":
            self._take_event(item.fields)
        else:
            self.window.clear()
            if self.validation and self.validation.step > item.step:
                self.validation = None

    def _take_row(self, item: FollowedItem) -> None:
        self.row = row = item.fields
        self.window.append(row)
        if (loss := _float(row.get("validation_loss"))) is not None:
            self.validation = ValidationPoint(row["step"], loss)
        if item.time >= self.since:
            self._count(row)

    def _count(self, row: Mapping[str, Any]) -> None:
        self.spent_s.update(parts_of(row))
        tokens = round((_float(row.get("tokens_per_s")) or 0.0) * (_float(row.get("step_s")) or 0.0))
        self.trained_tokens += tokens
        if (forecast := self.forecast) is None:
            return
        for link in forecast.links:
            share = 1.0 if link.purpose == OF_A_STEP else tokens / forecast.tokens  # a growing batch starts smaller
            self.link_bytes[link.level, link.purpose] += round(share * link.bytes)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        name = event["event"]
        self.counts[name] += 1
        if name == "start":
            self.start, self.end = event, None
            self.window.clear()
            self.stragglers.clear()
            self.devices.clear()
            self.forecast = read_forecast(self.run) or self.forecast
        elif name == "end":
            self.end = event
        elif name == "save":
            self.save = event
        elif name == "straggler" and isinstance(rank := event.get("rank"), int):
            self.stragglers[rank] = event
        elif name == "straggler_over":
            self.stragglers.pop(event.get("rank", -1), None)
        elif name == "device":
            self.devices[event.get("rank")] = event

    # ---- derived values

    @property
    def last_step(self) -> int | None:
        """The last step of the run, or of its phase."""
        last = self.start.get("last_step")
        return last if isinstance(last, int) else None

    def number(self, name: str) -> float | None:
        """Return a number of the last row; NaN if it is not finite."""
        if name in self.row and self.row[name] is None:
            return math.nan
        return _float(self.row.get(name))

    @property
    def mfu(self) -> float | None:
        """MFU of the last step: share of the BF16 peak of all devices."""
        speed, forecast = self.number("tokens_per_s"), self.forecast
        if speed is None or forecast is None or not forecast.peak_flops:
            return None
        return speed * forecast.flops_per_token / forecast.peak_flops

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of time of each part over the last steps; empty if unknown."""
        total: Counter[str] = Counter()
        for row in self.window:
            total.update(parts_of(row))
        total_s = sum(total.values())
        return {part: seconds / total_s for part, seconds in total.items()} if total_s else {}

    @property
    def layers(self) -> Mapping[str, float]:
        """Tokens of the busiest expert over the mean, by layer."""
        imbalances = self.row.get("layer_imbalance")
        imbalances = imbalances if isinstance(imbalances, dict) else {}
        return {name: ratio for name, value in imbalances.items() if (ratio := _float(value)) is not None}

    @property
    def failing(self) -> Mapping[str, Any]:
        """Places that checkpoints cannot be copied to at present → the step of the first failure."""
        places = self.row.get(FAILING)
        return places if isinstance(places, dict) else {}

    @property
    def pace_s(self) -> float | None:
        """Seconds per step over the last steps, including saves and validations."""
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
        """Whether the run has ended, and no further phase follows automatically."""
        if self.end is None:
            return False
        has_next = self.forecast is not None and self.forecast.phase < self.forecast.phases
        return not (has_next and self.end.get("outcome") == "finished")


def parts_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a row by parts (runtime/step/step_time.py)."""
    seconds_by_part = row.get("spent_s")
    seconds_by_part = seconds_by_part if isinstance(seconds_by_part, dict) else {}
    return {part: seconds for part, value in seconds_by_part.items() if (seconds := _float(value)) is not None}


def read_forecast(run: Path) -> WatchFacts | None:
    """Read the predictions for the run in a folder; None if missing or of another version."""
    with suppress(OSError, FormError, ValueError):
        return WatchFacts.from_json(read_bytes(run / WATCH, MOST_FORECAST_BYTES))
    return None


def seconds_of(time: Any) -> float | None:
    """Convert an ISO 8601 time to seconds since 1970."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except (TypeError, ValueError):
        return None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# --- Whether a run is active, as far as its folder shows


def is_held(run: Path) -> bool:
    """Whether a process holds the lock of the run folder. Also False if locks of another machine are not visible."""
    try:
        lock = os.open(run / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once; a starting run waits for longer
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
