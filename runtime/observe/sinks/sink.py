"""What an exporter is: a `Sink` that gets the items of a run in their order, with the numbers of each row by name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from runtime.build.build import Build
from runtime.build.files import WATCH
from runtime.contract import Metrics, Watch
from runtime.observe.watch.follow import Item
from runtime.observe.watch.run_state import State
from runtime.system.lines import open_regular, utc_now
from runtime.system.outcome import tell
from runtime.system.strict_json import FormError, tree

DRAIN_S = 30.0  # for what is left at the end of a run
LAST_TRY_S = 5.0  # of an exporter that does not work
UNNAMED = ("step", "time", "phase", "not_finite")  # of a row: no numbers to draw


class Point(NamedTuple):
    """An item, and of a row its numbers: `loss`, `spent_s/compute`, `mfu`. NaN is one of them."""

    item: Item
    values: Mapping[str, float]


@dataclass
class Opened:
    """What a sink is opened with. `key`: under which the run is known to a server, from an earlier start of the run;
    None: it is not yet. `step`: rows up to it were exported by then."""

    run: Path
    metrics: Metrics
    state: State  # after the items that were sent
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


def numbers(row: Mapping[str, Any], state: State) -> dict[str, float]:
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


# --- The process of the exporters, as the supervisor of a run has it beside itself

LOG = "exporters.log"
MOST_S = 2 * (DRAIN_S + LAST_TRY_S)  # it may wait for the exporters of an earlier start first
QUIET_S = 2.0  # that nobody is told what is waited for


class Exporters:
    """The exporters that the build of a run asks for, from `begin` to `close`. Where they cannot be started, the run
    goes on without."""

    def __init__(self, build: Build, run: Path) -> None:
        self._build, self._run = build, run
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start them, unless they are there."""
        try:
            watch = Watch.from_json(self._build.files[WATCH])
        except (KeyError, FormError):  # of an edited build
            return
        if watch.metrics is None or self._process is not None:
            return
        run = self._run
        try:
            (run / "logs").mkdir(parents=True, exist_ok=True)
            log_file = open_regular(run / "logs" / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(log_file, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runtime.observe.sinks", str(run), utc_now()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C is for the ranks: it ends when they have
                )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(tree(watch)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            tell(f"nothing is exported: {error.filename or 'the exporters'}: {error.strerror}")

    def close(self, *, waits: bool) -> None:
        """Ask for the end. `waits`: until all is exported, or until it takes too long; the process ends by itself."""
        if self._process is None:
            return
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if not waits:
            return
        log = self._run / "logs" / LOG
        try:
            if not self._ends_within(QUIET_S):
                tell("exporting the last numbers")
                if not self._ends_within(MOST_S):  # it ends by itself, unless it is stopped
                    self._process.kill()
                    tell(f"exporters did not end within {MOST_S:g} s, and were killed: {log}")
                    return
        except KeyboardInterrupt:  # the run has come to its end, and that is what its exit code says
            tell("the last numbers are exported in the background")
            return
        if self._process.returncode:
            tell(f"some of the last numbers were not exported: {log} says why")

    def _ends_within(self, seconds: float) -> bool:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode is not None
