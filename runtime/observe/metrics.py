"""metrics.jsonl: one row per step, written by rank 0 as soon as the step is done.

    {"step": 3, "time": "2026-01-31T12:00:00.123Z", "loss": 4.21, "grad_norm": 0.8, …}

`time` is when the row was written (ISO 8601, UTC). runtime/system/lines.py writes, keeps and moves rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.system.lines import JsonLines, print_to_stderr, utc_now
from runtime.system.regular_files import open_regular

FILE = "metrics.jsonl"


class MetricsWriter(JsonLines):
    """Writes metrics. `resume_step`: older rows of later steps, from before the resume, are moved to
    metrics.1.jsonl."""

    def __init__(self, run: Path, resume_step: int = 0, say: Callable[[str], None] = print_to_stderr) -> None:
        super().__init__(run / FILE, resume_step, say)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row: `step` and other JSON values, where floats may be non-finite."""
        super().write({"step": row["step"], "time": utc_now(), **row})


def check_metrics(run: Path) -> None:
    """Raise OSError if the metrics of a run folder exist and cannot be read or written."""
    try:
        os.close(open_regular(run / FILE, os.O_RDWR | os.O_APPEND))
    except FileNotFoundError:
        return
