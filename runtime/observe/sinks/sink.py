"""The interface of exporters: a `Sink` gets the items of a run in order, with the numbers of each row by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from runtime.contract import MetricsSinks
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState

DRAIN_S = 30.0  # for remaining items at the end of a run
LAST_TRY_S = 5.0  # for a failing exporter
UNNAMED = ("step", "time", "phase", "not_finite")  # columns of a row that are not exported


class Point(NamedTuple):
    """An item and, for a row, its numbers: `loss`, `spent_s/compute`, `mfu`. They may be NaN."""

    item: FollowedItem
    values: Mapping[str, float]


@dataclass
class SinkContext:
    """The arguments of `Sink.open`. `key`: identifies the run on a server, from an earlier start; None for a new run.
    `step`: rows up to this step were exported by earlier starts."""

    run: Path
    metrics: MetricsSinks
    state: RunState  # after all sent items
    key: str | None = None
    step: int = 0

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.state.forecast.run if self.state.forecast else self.run.resolve().name


class Sink(Protocol):
    """An exporter. After an exception, `open`, or `send` with the same points, is retried later.

    `destination`: of the numbers, for messages; known after `open`. `key`: as in `SinkContext`.
    """

    destination: str
    key: str | None

    def open(self, opened: SinkContext) -> None:
        """Connect. Imports the library of the exporter."""

    def send(self, points: Sequence[Point]) -> None:
        """Export points. They are delivered when this returns."""

    def close(self) -> None:
        """End the export."""


def numbers(row: Mapping[str, Any], state: RunState) -> dict[str, float]:
    """Return the numbers of a row by name, with MFU. `state`: after the row."""
    values: dict[str, float] = {}
    for name, value in row.items():
        if name in UNNAMED:
            continue
        if isinstance(value, Mapping):
            values |= {f"{name}/{key}": float(number) for key, number in value.items() if _is_number(number)}
        elif value is None:
            values[name] = math.nan
        elif _is_number(value):
            values[name] = float(value)
    if state.mfu is not None:
        values["mfu"] = state.mfu
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
