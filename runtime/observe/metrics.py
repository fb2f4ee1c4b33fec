"""metrics.jsonl: one row a step, by rank 0, as soon as the step is done.

    {"step": 3, "time": "2026-01-31T12:00:00.123Z", "loss": 4.21, "grad_norm": 0.8, …}

`time` is when the row was written: ISO 8601, UTC. How rows are written, kept and moved aside: runtime/system/lines.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.system.lines import JsonLines, to_stderr, utc_now
from runtime.system.regular_files import open_regular

FILE = "metrics.jsonl"


class MetricsWriter(JsonLines):
    """The writer. `resume_step`: rows of later steps, of the training before the resume, go to metrics.1.jsonl."""

    def __init__(self, run: Path, resume_step: int = 0, say: Callable[[str], None] = to_stderr) -> None:
        super().__init__(run / FILE, resume_step, say)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: `step` and whatever else, JSON but for floats that are not finite."""
        super().write({"step": row["step"], "time": utc_now(), **row})


def check_metrics(run: Path) -> None:
    """Raise the OSError with which the metrics of a run folder cannot be read or written; none where there is none."""
    try:
        os.close(open_regular(run / FILE, os.O_RDWR | os.O_APPEND))
    except FileNotFoundError:
        return
