"""What an exporter is: a `Sink` that gets the items of a run in their order, with the numbers of each row by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from runtime.contract import MetricsSinks
from runtime.observe.watch.follow import FollowedItem
from runtime.observe.watch.run_state import RunState

DRAIN_S = 30.0  # for what is left at the end of a run
LAST_TRY_S = 5.0  # of an exporter that does not work
UNNAMED = ("step", "time", "phase", "not_finite")  # of a row: no numbers to draw


class Point(NamedTuple):
    """An item, and of a row its numbers: `loss`, `spent_s/compute`, `mfu`. NaN is one of them."""

    item: FollowedItem
    values: Mapping[str, float]


@dataclass
class Opened:
    """What a sink is opened with. `key`: under which the run is known to a server, from an earlier start of the run;
    None: it is not yet. `step`: rows up to it were exported by then."""

    run: Path
    metrics: MetricsSinks
    state: RunState  # after the items that were sent
    key: str | None = None
    step: int = 0

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.state.forecast.run if self.state.forecast else self.run.resolve().name


class Sink(Protocol):
    """An exporter. Any exception means that it does not work now: it is opened, or sent the same points, again later.

    `where`: for people, what the numbers go to; known once it is open. `key`: as of `Opened`.
    """

    where: str
    key: str | None

    def open(self, opened: Opened) -> None:
        """Connect. What it needs beyond dsc is imported here."""

    def send(self, points: Sequence[Point]) -> None:
        """Export points: when this returns, they are where they belong."""

    def close(self) -> None:
        """End the export."""


def numbers(row: Mapping[str, Any], state: RunState) -> dict[str, float]:
    """The numbers of a row by name, with those of the plan beside. `state`: after the row."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if name in UNNAMED:
            continue
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": float(each) for key, each in value.items() if _is_number(each)}
        elif value is None:
            found[name] = math.nan
        elif _is_number(value):
            found[name] = float(value)
    if state.mfu is not None:
        found["mfu"] = state.mfu
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
