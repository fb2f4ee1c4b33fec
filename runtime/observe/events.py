"""events.jsonl: the events of a run besides its steps, one JSON object per line, for users and scripts.

    {"time": "2026-01-31T12:00:00.123Z", "event": "save", "step": 300, "checkpoint": "step-00000300", …}

    Events(run).write("save", step=300, seconds=0.8)

Several processes may append whole lines. Errors never fail a run: what cannot be written is kept and written later,
while the process lives. docs/json.md lists the events and their fields.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from runtime.system.lines import JsonLines, print_to_stderr, utc_now

FILE = "events.jsonl"
Event = Literal[
    "start",
    "channels",
    "rows",
    "boundary",
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
    "straggler",
    "straggler_over",
    "device",
    "export",
    "export_failed",
    "end",
]


class Events:
    """The event log of a run folder, which must exist at the first `write`."""

    def __init__(self, run: Path, say: Callable[[str], None] = print_to_stderr) -> None:
        self._lines = JsonLines(run / FILE, say=say, noun="events")

    def write(self, event: Event, **fields: Any) -> None:
        """Append an event with the time and its fields, which are JSON values."""
        self._lines.write({"time": utc_now(), "event": event, **fields})

    def close(self) -> None:
        """Write the kept events, if that is possible now."""
        self._lines.close()
