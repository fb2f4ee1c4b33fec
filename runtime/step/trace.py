"""trace/rank_<r>.jsonl: what a rank did when, a line a traced step.

    {"step": 3, "program": "train_8", "of": "5c0f…", "actions": [["F0.0", 81520, 82004], ["(F0.1|B1.0)", 82100, …], …]}

`of` is the digest of the build's programs (runtime/build/run_copy.py): a run that is resumed under another plan has
lines of both. An action's times are its start (when the first message it awaits was there) and its end, in
microseconds of CLOCK_MONOTONIC, so that the ranks of one machine share a time axis. Kept small by what is traced:
every one of the first steps, then steps 64, 128, 256, …, and the step that a replay trains again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from runtime.system.lines import JsonLines, to_stderr

EVERY_ONE_TO = 32  # steps

Span: TypeAlias = tuple[str, int, int]  # label, start and end in µs


def is_traced(step: int) -> bool:
    return step <= EVERY_ONE_TO or step & (step - 1) == 0


class Trace:
    """The writer of one rank. `resume_step`: lines of later steps, of the training before the resume, go to
    rank_<r>.1.jsonl. `of`: the digest of the programs that are run."""

    def __init__(self, run: Path, rank: int, resume_step: int, of: str, say: Callable[[str], None] = to_stderr) -> None:
        folder = run / "trace"
        with suppress(OSError):  # the writer says what is wrong
            folder.mkdir(exist_ok=True)
        self._of = of
        self._lines = JsonLines(folder / f"rank_{rank}.jsonl", resume_step, say, "traced steps")

    def write(self, step: int, program: str, actions: Sequence[Span], *, wanted: bool = False) -> None:
        """Append a step's line, if it is traced or `wanted`."""
        if wanted or is_traced(step):
            self._lines.write({"step": step, "program": program, "of": self._of, "actions": actions})

    def close(self) -> None:
        self._lines.close()
