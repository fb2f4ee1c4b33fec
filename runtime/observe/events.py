"""The files of a run that rank 0 appends to: metrics.jsonl, a row a step, and events.jsonl, what happened besides."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from runtime.system.lines import Lines, open_regular, to_stderr, utc_now

# --- events.jsonl: what happened to a run besides its steps, one JSON object a line, for people and scripts
#
#     {"time": "2026-01-31T12:00:00.123Z", "event": "save", "step": 300, "checkpoint": "step-00000300", …}
#
#     Events(run).write("save", step=300, seconds=0.8)
#
# Several processes may append, each its whole lines. Nothing here can fail a run: what cannot be written is kept and
# written later, as far as the process lives. docs/json.md lists the events and their fields.

FILE = "events.jsonl"
Event = Literal[
    "start",
    "channels",
    "rows",
    "restore",
    "resume",
    "refused",
    "save",
    "save_failed",
    "copy",
    "copy_failed",
    "notice",
    "stop",
    "restart",
    "bad_step",
    "fault",
    "export",
    "export_failed",
    "end",
]


class Events:
    """The event log of a run folder, which must exist by the first `write`."""

    def __init__(self, run: Path, say: Callable[[str], None] = to_stderr) -> None:
        self._lines = Lines(run / FILE, say=say, noun="events")

    def write(self, event: Event, **fields: Any) -> None:
        """Append an event with the time and its fields: JSON values."""
        self._lines.write({"time": utc_now(), "event": event, **fields})

    def close(self) -> None:
        """Write what is kept, if that is possible now."""
        self._lines.close()


# --- metrics.jsonl: one row a step, by rank 0, as soon as the step is done
#
#     {"step": 3, "time": "2026-01-31T12:00:00.123Z", "loss": 4.21, "grad_norm": 0.8, …}
#
# `time` is when the row was written: ISO 8601, UTC. How rows are written, kept and moved aside:
# runtime/system/lines.py.

METRICS = "metrics.jsonl"


class Metrics(Lines):
    """The writer. `resume_step`: rows of later steps, of the training before the resume, go to metrics.1.jsonl."""

    def __init__(self, run: Path, resume_step: int = 0, say: Callable[[str], None] = to_stderr) -> None:
        super().__init__(run / METRICS, resume_step, say)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: `step` and whatever else, JSON but for floats that are not finite."""
        super().write({"step": row["step"], "time": utc_now(), **row})


def check_metrics(run: Path) -> None:
    """Raise the OSError with which the metrics of a run folder cannot be read or written; none where there is none."""
    try:
        os.close(open_regular(run / METRICS, os.O_RDWR | os.O_APPEND))
    except FileNotFoundError:
        return
