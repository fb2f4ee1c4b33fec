"""A process of one reward (runtime/data/rewards/worker.py), as it is started, asked and ended, with a limit on its
time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.data.rewards.errors import RewardError
from runtime.system.limited import DeadError, FaultError, LateError, Limited
from runtime.system.outcome import shortened

DATA_BYTES = 4 << 30
START_S = 120.0  # until the file is imported: a library may take its time


class Process:
    """The process of a reward, which is started at once and answers questions.

    `name`: of the reward; `place`: the file or pattern that a message names; `what`: the first question, which says
    what it runs; `folder`: where it runs; `quicker`: what to do where it takes too long.

    The kernel ends it with the thread that starts it.
    """

    def __init__(self, name: str, place: str, what: Mapping[str, Any], folder: Path | None, quicker: str) -> None:
        self.name, self.place, self.quicker = name, place, quicker
        self._process = Limited("runtime.data.rewards.worker", DATA_BYTES, folder)
        self._what = what

    def begin(self) -> None:
        """Wait until it can be asked. Raises RewardError if the file or pattern is none."""
        what_for = ("to be compiled", "simplify it") if "pattern" in self._what else ("to be imported", "import less")
        self._answer(self._what, START_S, *what_for)

    def values(self, question: Mapping[str, Any], seconds: float) -> list[float]:
        """A value for each completion. Raises RewardError if there is none, or none in time."""
        completions = len(question["completions"])
        hint = f"{self.quicker}, or write `seconds = {2 * seconds:g}`"
        found = self._answer(question, seconds, f"for {completions} completion{'s' * (completions != 1)}", hint)
        values: list[float] = found["values"]
        return values

    def end(self) -> None:
        """End the process, and what it has started."""
        self._process.close()

    def _answer(self, question: Mapping[str, Any], seconds: float, what_for: str, hint: str) -> dict[str, Any]:
        try:
            return self._process.answer(question, seconds)
        except LateError:
            fault = f"{self.place}: takes more than {seconds:g} s {what_for}"
        except DeadError as dead:
            fault, hint = f"{self.place}: {dead}", "correct it"
        except FaultError as found:
            fault, hint = str(found), found.hint
        raise RewardError(f"reward `{self.name}`: {shortened(fault, 2000)}\n = hint: {hint}")
