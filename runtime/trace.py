"""trace/rank_<r>.jsonl: what a rank did when, a line a traced step.

    {"step": 3, "program": "train_8", "actions": [["F0.0", 81520, 82004], ["(F0.1|B1.0)", 82100, 83871], …]}

An action's times are its start (when the first message it awaits was there) and its end, in microseconds of
CLOCK_MONOTONIC, so that the ranks of one machine share a time axis. Kept small by what is traced: every one of the
first steps, then steps 64, 128, 256, … .
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from runtime.metrics import Metrics

EVERY_ONE_TO = 32  # steps

Span: TypeAlias = tuple[str, int, int]  # label, start and end in µs


def is_traced(step: int) -> bool:
    return step <= EVERY_ONE_TO or step & (step - 1) == 0


class Trace:
    """The writer of one rank. `resume_step`: lines of later steps, of the life before the resume, are cut off."""

    def __init__(self, run: Path, rank: int, resume_step: int) -> None:
        folder = run / "trace"
        with suppress(OSError):  # the writer says what is wrong
            folder.mkdir(exist_ok=True)
        self._lines = Metrics(folder / f"rank_{rank}.jsonl", resume_step)

    def write(self, step: int, program: str, actions: Sequence[Span]) -> None:
        """Append a step's line, if it is traced."""
        if is_traced(step):
            self._lines.write({"step": step, "program": program, "actions": actions})

    def close(self) -> None:
        self._lines.close()
