"""trace/rank_<r>.jsonl: the actions of a rank and their times, one line per traced step.

    {"step": 3, "program": "train_8", "of": "5c0f…", "actions": [["F0.0", 81520, 82004], ["(F0.1|B1.0)", 82100, …], …]}

`of` is the digest of the build's programs (runtime/build/run_copy.py): a run that is resumed under another plan has
lines of both. The times of an action are its start (arrival of the first message that it awaits) and its end, in
microseconds of CLOCK_MONOTONIC, so that the ranks of one machine share a time axis. To stay small, a trace has each of
the first 32 steps, then steps 64, 128, 256, …, and the step that a replay trains again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from runtime.system.lines import JsonLines, print_to_stderr

EVERY_ONE_TO = 32  # steps

Span: TypeAlias = tuple[str, int, int]  # label, start and end in µs


def is_traced(step: int) -> bool:
    return step <= EVERY_ONE_TO or step & (step - 1) == 0


class Trace:
    """The trace writer of one rank. `resume_step`: older lines of later steps, from before the resume, are moved to
    rank_<r>.1.jsonl. `programs`: the digest of the programs that run."""

    def __init__(
        self, run: Path, rank: int, resume_step: int, programs: str, say: Callable[[str], None] = print_to_stderr
    ) -> None:
        folder = run / "trace"
        with suppress(OSError):  # the writer reports the error
            folder.mkdir(exist_ok=True)
        self._programs = programs
        self._lines = JsonLines(folder / f"rank_{rank}.jsonl", resume_step, say, "traced steps")

    def write(self, step: int, program: str, actions: Sequence[Span], *, wanted: bool = False) -> None:
        """Append the line of a step, if it is traced or `wanted`."""
        if wanted or is_traced(step):
            self._lines.write({"step": step, "program": program, "of": self._programs, "actions": actions})

    def close(self) -> None:
        self._lines.close()
