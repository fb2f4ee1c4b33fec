"""Scores of completions by the rewards of a run.

`exact` and `format` are computed here (runtime/data/rewards/answers.py); a regular expression and a function of the
user each have a process of their own, and work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.contract import Reward
from runtime.data.rewards.answers import has_format, is_right
from runtime.data.rewards.errors import RewardError
from runtime.data.rewards.process import Process
from runtime.system.regular_files import read_bytes

MAX_FILE_BYTES = 16 << 20
ANSWER = "answer"  # the column with the answer of a row
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A completion, the prompt that it follows, and the columns of the prompt's row, `answer` among them.

    `messages`: those that the prompt was made from; None where the row has a text.
    """

    prompt: str
    completion: str
    columns: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None


class Rewards:
    """The rewards of a run, ready to score; a context manager. `sources`: by the name of a reward that is a function,
    its file, or the text of it.

    Start it in a thread that lives as long as it does: the kernel ends the processes with that thread. Raises
    RewardError where a file, a function or a pattern cannot be used.
    """

    def __init__(self, rewards: tuple[Reward, ...], sources: Mapping[str, Path | str]) -> None:
        self.rewards = rewards
        self._processes: dict[str, Process] = {}
        try:
            for reward in rewards:
                if reward.check == "regex":
                    self._start_regex(reward)
                elif reward.check == "python":
                    self._start_function(reward, sources[reward.name])
            self._each({name: process.begin for name, process in self._processes.items()})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, cases: Sequence[Case]) -> Scores:
        """[cases, rewards]: what each reward gives each completion, without its weight. Raises RewardError that names
        the reward."""
        found = np.zeros((len(cases), len(self.rewards)))
        if not cases:
            return found
        questions = {"regex": {"completions": [case.completion for case in cases]}, "python": _arguments(cases)}
        values = self._each(
            {
                reward.name: partial(self._processes[reward.name].values, questions[reward.check], reward.seconds)
                for reward in self.rewards
                if reward.name in self._processes
            }
        )
        for at, reward in enumerate(self.rewards):
            if reward.check == "exact":
                found[:, at] = [_exact(reward, case) for case in cases]
            elif reward.check == "format":
                found[:, at] = [has_format(case.completion) for case in cases]
            else:
                found[:, at] = values[reward.name]
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _start_regex(self, reward: Reward) -> None:
        pattern = f"pattern {reward.pattern!r}"
        what, quicker = {"pattern": reward.pattern}, "write a pattern that does not backtrack without end"
        self._processes[reward.name] = Process(reward.name, pattern, what, None, quicker)

    def _start_function(self, reward: Reward, source: Path | str) -> None:
        path = str(source) if isinstance(source, Path) else reward.named or reward.file or f"{reward.name}.py"
        text = _read(reward, source) if isinstance(source, Path) else source
        folder = source.parent if isinstance(source, Path) else None
        what = {
            "path": path,
            "text": text,
            "function": reward.function,
            "imports_from": str(folder) if folder else None,
        }
        self._processes[reward.name] = Process(reward.name, path, what, folder, "make it quicker")

    def _each(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """The results of calls by their names, all at the same time. Raises the first error in their order."""
        if not calls:
            return {}
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in futures.items()}


def _read(reward: Reward, path: Path) -> str:
    try:
        return read_bytes(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        reason = "not UTF-8"
    raise RewardError(f"reward `{reward.name}`: {path}: {reason}\n = hint: write `file` of a file of Python")


def _exact(reward: Reward, case: Case) -> float:
    if (answer := case.columns.get(ANSWER)) is None:
        raise RewardError(
            f"reward `{reward.name}`: `check = exact` compares with the answer of a row, and a row has none\n"
            ' = hint: write which column it is, as `answer = "solution"` in `prompts`'
        )
    return float(is_right(case.completion, answer))


def _arguments(cases: Sequence[Case]) -> dict[str, Any]:
    """The arguments of a function, as TRL has them: lists with an entry a case, of lists of messages where its row has
    messages."""
    names = dict.fromkeys(name for case in cases for name in case.columns)
    return {
        "prompts": [case.prompt if case.messages is None else [*case.messages] for case in cases],
        "completions": [
            case.completion if case.messages is None else [{"role": "assistant", "content": case.completion}]
            for case in cases
        ],
        "columns": {name: [case.columns.get(name) for case in cases] for name in names},
    }
