"""Scores of completions by the rewards of a run.

`exact` and `format` are computed in this process. A regular expression and a function of the user each have their own
process, and run at the same time.
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
from runtime.data.rewards.worker import MAX_REWARD
from runtime.system.limited import DeadError, FaultError, LateError, LimitedProcess
from runtime.system.outcome import ReportedError, shorten
from runtime.system.regular_files import read_bytes

# --- Errors of rewards: the message names the reward, the place and the edit


class RewardError(ReportedError):
    """A reward gives no values. This ends the run."""


# --- Checks of a completion's text without a process: the right answer, and the tags of thinking and answer
#
# Answers are written as in GSM8K (`#### 72`, arXiv 2110.14168), MATH (`\boxed{72}`, arXiv 2103.03874) and DeepSeek-R1
# (`<answer>72</answer>`, arXiv 2501.12948). Each function reads a text once, whatever a model has written.

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LINE_MARK = "####"
_BRACE = re.compile(r"(\\boxed\s*\{)|\\.|[{}]", re.DOTALL)
# 1,234.50 and 1e-3 and 3/4. An exponent has at most three digits: 1e999999999 would fill memory.
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?|[+-]?[0-9]+/[0-9]+"
)
_MAX_NUMBER = 64  # characters


def is_right(completion: str, answer: object) -> bool:
    """Whether the answer in a completion equals that of its row: a text, a number, or a list of accepted answers.

    White space, surrounding `$` and a final full stop do not count. Numbers compare as numbers: 1,000 equals 1e3.
    """
    if isinstance(answer, list):
        return any(is_right(completion, accepted) for accepted in answer)
    given_answer, wanted = normalise_answer(answer_in(completion)), normalise_answer(answer_in(f"{answer}"))
    if given_answer == wanted:
        return True
    number = number_of(given_answer)
    return number is not None and number == number_of(wanted)


def answer_in(text: str) -> str:
    """Return the answer in a text: the contents of the last `\\boxed{…}`, else of the last `<answer>…</answer>`, else
    the first line after the last `####`, else the whole text."""
    if (answer := _last_boxed_contents(text)) is not None:
        return answer
    head, closed, _ = text.rpartition(TAGS[3])
    _, opened, answer = head.rpartition(TAGS[2])
    if closed and opened:
        return answer
    _, marked, answer = text.rpartition(LINE_MARK)
    return answer.strip().partition("\n")[0] if marked else text


def normalise_answer(answer: str) -> str:
    """Normalise an answer: remove what does not count in comparisons."""
    answer_text = " ".join(answer.split()).removesuffix(".")
    if answer_text.startswith("\\(") and answer_text.endswith("\\)"):
        answer_text = answer_text[2:-2]
    return answer_text.removeprefix("\\$").strip("$ ")


def number_of(text: str) -> Fraction | None:
    """Return the exact number that a text is; None if it is none."""
    text = text.replace("\N{MINUS SIGN}", "-")
    if len(text) > _MAX_NUMBER or not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", ""))
    except ZeroDivisionError:
        return None


def has_format(completion: str) -> bool:
    """Whether a completion is `<think>…</think><answer>…</answer>`, with each tag once and optional white space."""
    if any(completion.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, remainder = completion.partition(TAGS[1])
    between, _, answered = remainder.partition(TAGS[2])
    return (
        thought.lstrip().startswith(TAGS[0])
        and not between.strip()
        and answered.rstrip().endswith(TAGS[3])  # the tag occurs once, so this is the only one
    )


def _last_boxed_contents(text: str) -> str | None:
    """Return the contents of the closed `\\boxed{…}` that begins last."""
    opened: list[tuple[int, bool]] = []  # (start of the contents of braces, whether they are boxed)
    last, contents = -1, None
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.end(), bool(match[1])))
        elif match[0] == "}" and opened:
            begin, boxed = opened.pop()
            if boxed and begin > last:
                last, contents = begin, text[begin : match.start()]
    return contents


# --- Starting, calling and ending the process of one reward (runtime/data/rewards/worker.py), with a time limit

DATA_BYTES = 4 << 30
START_S = 120.0  # for importing the file, whose libraries may be slow


class RewardProcess:
    """The process of a reward. It is started immediately and answers questions.

    `name`: name of the reward; `place`: the file or pattern for messages; `code`: the first question, with the code to
    run; `folder`: working folder, which the code can read; `quicker`: hint if it takes too long.

    The kernel ends the process with the thread that started it.
    """

    def __init__(self, name: str, place: str, code: Mapping[str, Any], folder: Path | None, quicker: str) -> None:
        self.name, self.place, self.quicker = name, place, quicker
        self._process = LimitedProcess("runtime.data.rewards.worker", DATA_BYTES, folder)
        self._code = code

    def begin(self) -> None:
        """Wait until the process is ready. Raises RewardError if the file or pattern is invalid."""
        purpose_and_hint = (
            ("to be compiled", "simplify it") if "pattern" in self._code else ("to be imported", "import less")
        )
        self._answer(self._code, START_S, *purpose_and_hint)

    @property
    def no_boundary(self) -> str:
        """Why the code of a process that is ready has the rights of this run, "" if it has not."""
        return self._process.no_boundary or ""

    def values(self, question: Mapping[str, Any], seconds: float) -> list[float]:
        """Return a value for each completion. Raises RewardError if that fails or takes too long."""
        completions = len(question["completions"])
        hint = f"{self.quicker}, or write `seconds = {2 * seconds:g}`"
        answer = self._answer(question, seconds, f"for {completions} completion{'s' * (completions != 1)}", hint)
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != completions or not all(map(_is_reward, values)):
            self.end()  # its process checks them too, but the code may write answers itself
            raise RewardError(f"reward `{self.name}`: {self.place}: its process wrote an invalid answer")
        return values

    def end(self) -> None:
        """End the process and its children."""
        self._process.close()

    def _answer(self, question: Mapping[str, Any], seconds: float, purpose: str, hint: str) -> dict[str, Any]:
        try:
            return self._process.answer(question, seconds)
        except LateError:
            fault = f"{self.place}: takes more than {seconds:g} s {purpose}"
        except DeadError as dead:
            fault, hint = f"{self.place}: {dead}", "correct it"
        except FaultError as error:
            fault, hint = str(error), error.hint
        raise RewardError(f"reward `{self.name}`: {shorten(fault, 2000)}\n = hint: {hint}")


def _is_reward(value: object) -> bool:
    return isinstance(value, float) and abs(value) <= MAX_REWARD


# --- scoring

MAX_FILE_BYTES = 16 << 20
ANSWER = "answer"  # the column with the answer of a row
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A completion, its prompt, and the columns of the prompt's row, including `answer`.

    `messages`: the messages of the prompt; None if the row has a text.
    """

    prompt: str
    completion: str
    columns: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None


class Rewards:
    """The rewards of a run, ready to score; a context manager. `sources`: for each reward that is a function, its file
    or the text of the file.

    Construct it in a thread that lives at least as long: the kernel ends the processes with that thread. Raises
    RewardError if a file, a function or a pattern cannot be used.
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
            self._run_all({name: process.begin for name, process in self._processes.items()})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, cases: Sequence[Case]) -> Scores:
        """Return the unweighted rewards of completions: [cases, rewards]. Raises RewardError that names the reward."""
        scores = np.zeros((len(cases), len(self.rewards)))
        if not cases:
            return scores
        questions = {"regex": {"completions": [case.completion for case in cases]}, "python": _arguments(cases)}
        values = self._run_all(
            {
                reward.name: partial(self._processes[reward.name].values, questions[reward.check], reward.seconds)
                for reward in self.rewards
                if reward.name in self._processes
            }
        )
        for column, reward in enumerate(self.rewards):
            if reward.check == "exact":
                scores[:, column] = [_exact(reward, case) for case in cases]
            elif reward.check == "format":
                scores[:, column] = [has_format(case.completion) for case in cases]
            else:
                scores[:, column] = values[reward.name]
        return scores

    @property
    def no_boundary(self) -> str | None:
        """Why functions of the user have the rights of this run, "" if they have not; None if there is no function."""
        reasons = [self._processes[reward.name].no_boundary for reward in self.rewards if reward.check == "python"]
        return max(reasons, default=None)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.end()
        self._processes.clear()

    def _start_regex(self, reward: RewardRecipe) -> None:
        pattern = f"pattern {reward.pattern!r}"
        code, quicker = {"pattern": reward.pattern}, "write a pattern that does not backtrack without end"
        self._processes[reward.name] = RewardProcess(reward.name, pattern, code, None, quicker)

    def _start_function(self, reward: RewardRecipe, source: Path | str) -> None:
        path = str(source) if isinstance(source, Path) else reward.named or reward.file or f"{reward.name}.py"
        text = _read(reward, source) if isinstance(source, Path) else source
        folder = source.parent if isinstance(source, Path) else None
        code = {
            "path": path,
            "text": text,
            "function": reward.function,
            "imports_from": str(folder) if folder else None,
        }
        self._processes[reward.name] = RewardProcess(reward.name, path, code, folder, "make it quicker")

    def _run_all(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Run calls at the same time and return their results by name. Raises the first error in their order."""
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
    """Return the arguments of a reward function as in TRL: lists with an entry per case, which is a list of messages if
    the row has messages."""
    names = dict.fromkeys(name for case in cases for name in case.columns)
    return {
        "prompts": [case.prompt if case.messages is None else [*case.messages] for case in cases],
        "completions": [
            case.completion if case.messages is None else [{"role": "assistant", "content": case.completion}]
            for case in cases
        ],
        "columns": {name: [case.columns.get(name) for case in cases] for name in names},
    }
