"""Scores of completions by the rewards of a run.

`exact` and `format` are computed here (runtime/data/rewards/scoring.py); a regular expression and a function of the
user each have a process of their own, and work at the same time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.contract import RewardRecipe
from runtime.system.limited import DeadError, FaultError, LateError, Limited
from runtime.system.outcome import ReportedError, shortened
from runtime.system.regular_files import read_bytes

# --- What the user must mend about a reward: one exception, its message names the reward, the place and the edit


class RewardError(ReportedError):
    """A reward gives no values. It ends the run."""


# --- Checks of a completion's text that need no process: is the answer the right one, and are thinking and answer
# marked
#
# Answers are written as in GSM8K (`#### 72`, arXiv 2110.14168), MATH (`\boxed{72}`, arXiv 2103.03874) and DeepSeek-R1
# (`<answer>72</answer>`, arXiv 2501.12948). Each function reads a text once, whatever a model has written.

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LINE_MARK = "####"
_BRACE = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
# 1,234.50 and 1e-3 and 3/4. An exponent has three digits at most: 1e999999999 would fill memory.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|[+-]?[0-9]+/[0-9]+"
)
_MAX_NUMBER = 64  # characters


def is_right(completion: str, answer: object) -> bool:
    """Whether the answer in a completion equals that of its row: a text, a number, or a list of which one is right.

    White space, `$` around it and a full stop at its end do not count. Numbers compare as numbers: 1,000 is 1e3.
    """
    if isinstance(answer, list):
        return any(is_right(completion, each) for each in answer)
    found, wanted = plain(answer_in(completion)), plain(answer_in(f"{answer}"))
    if found == wanted:
        return True
    number = number_of(found)
    return number is not None and number == number_of(wanted)


def answer_in(text: str) -> str:
    """The answer in a text: in its last `\\boxed{…}`, else in the last `<answer>…</answer>`, else the first line behind
    the last `####`, else all of the text."""
    if (found := _last_boxed(text)) is not None:
        return found
    head, closed, _ = text.rpartition(TAGS[3])
    _, opened, found = head.rpartition(TAGS[2])
    if closed and opened:
        return found
    _, marked, found = text.rpartition(LINE_MARK)
    return found.strip().partition("\n")[0] if marked else text


def plain(answer: str) -> str:
    """An answer without what does not count."""
    found = " ".join(answer.split()).removesuffix(".")
    if found.startswith("\\(") and found.endswith("\\)"):
        found = found[2:-2]
    return found.removeprefix("\\$").strip("$ ")


def number_of(text: str) -> Fraction | None:
    """The number that a text is, exactly; None if it is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if len(text) > _MAX_NUMBER or not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except ZeroDivisionError:
        return None


def has_format(completion: str) -> bool:
    """Whether a completion is `<think>…</think>`, then `<answer>…</answer>`, each tag once, and white space around."""
    if any(completion.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = completion.partition(TAGS[1])
    between, _, answered = rest.partition(TAGS[2])
    return (
        thought.lstrip().startswith(TAGS[0])
        and not between.strip()
        and answered.rstrip().endswith(TAGS[3])  # once in all of it, so that its end is the only one
    )


def _last_boxed(text: str) -> str | None:
    """What is in the `\\boxed{…}` that begins last, of those whose brace is closed."""
    opened: list[tuple[int, bool]] = []  # where what is in braces begins, and whether it is boxed
    last, found = -1, None
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.end(), bool(match[1])))
        elif match[0] == "}" and opened:
            begin, boxed = opened.pop()
            if boxed and begin > last:
                last, found = begin, text[begin : match.start()]
    return found


# --- A process of one reward (runtime/data/rewards/worker.py), as it is started, asked and ended, with a limit on its
# time

DATA_BYTES = 4 << 30
START_S = 120.0  # until the file is imported: a library may take its time


class RewardProcess:
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


# --- scoring

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

    def __init__(self, rewards: tuple[RewardRecipe, ...], sources: Mapping[str, Path | str]) -> None:
        self.rewards = rewards
        self._processes: dict[str, RewardProcess] = {}
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

    def _start_regex(self, reward: RewardRecipe) -> None:
        pattern = f"pattern {reward.pattern!r}"
        what, quicker = {"pattern": reward.pattern}, "write a pattern that does not backtrack without end"
        self._processes[reward.name] = RewardProcess(reward.name, pattern, what, None, quicker)

    def _start_function(self, reward: RewardRecipe, source: Path | str) -> None:
        path = str(source) if isinstance(source, Path) else reward.named or reward.file or f"{reward.name}.py"
        text = _read(reward, source) if isinstance(source, Path) else source
        folder = source.parent if isinstance(source, Path) else None
        what = {
            "path": path,
            "text": text,
            "function": reward.function,
            "imports_from": str(folder) if folder else None,
        }
        self._processes[reward.name] = RewardProcess(reward.name, path, what, folder, "make it quicker")

    def _each(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """The results of calls by their names, all at the same time. Raises the first error in their order."""
        if not calls:
            return {}
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in futures.items()}


def _read(reward: RewardRecipe, path: Path) -> str:
    try:
        return read_bytes(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        reason = "not UTF-8"
    raise RewardError(f"reward `{reward.name}`: {path}: {reason}\n = hint: write `file` of a file of Python")


def _exact(reward: RewardRecipe, case: Case) -> float:
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
