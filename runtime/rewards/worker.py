"""A reward that is code, in a process of its own: `python -P -m runtime.rewards.worker DATA_BYTES`.

A function of the user may hang, print, end its process or fill memory, and a regular expression may backtrack without
end. So both run here, with a limit on memory, and whoever asks (runtime/rewards/process.py) limits the time.

Standard input has a line of JSON: {"pattern"} of a regular expression, or {"path", "text", "function"} of a file of
Python. Then comes one for each call: {"prompts", "completions", "columns"}. Standard output has a line of JSON for
each: {} first, then {"values": [a number for each completion]}; or {"fault": why not, "hint": what to do}, and its end.
What the function prints goes to standard error, and it reads an empty standard input.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from runtime.limits import end_with_parent, limit, too_much_memory

Question = Mapping[str, Any]
Score = Callable[[Question], list[float]]
MODULE = "reward"  # the name of the user's file as a module
MAX_SAID = 2000  # characters of a reason


class _FaultError(Exception):
    """Why there are no values, and what to do."""

    def __init__(self, fault: str, hint: str) -> None:
        super().__init__(fault)
        self.hint = hint


def main(argv: list[str]) -> int:
    data_bytes = int(argv[0])
    end_with_parent()
    limit(resource.RLIMIT_DATA, data_bytes)
    questions, answers = _private_streams()
    try:
        score = _score_of(json.loads(questions.readline()))
        _answer(answers, {})
        for line in questions:
            _answer(answers, {"values": score(json.loads(line))})
    except KeyboardInterrupt:
        return 1
    except MemoryError:
        _answer(answers, {"fault": too_much_memory(data_bytes), "hint": "hold less"})
        return 1
    except _FaultError as fault:
        _answer(answers, {"fault": f"{fault}"[:MAX_SAID], "hint": fault.hint})
        return 1
    return 0


def _private_streams() -> tuple[IO[bytes], IO[bytes]]:
    """The questions and the answers, where nothing that the function prints or reads can reach them."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    return questions, answers


def _answer(answers: IO[bytes], answer: Mapping[str, Any]) -> None:
    sys.stdout.flush()
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


def _score_of(what: Question) -> Score:
    if "pattern" in what:
        return _search(what["pattern"])
    return _call(_function(**what), what["path"], what["function"])


# ---------------------------------------------------------------- a regular expression


def _search(pattern: str) -> Score:
    try:
        search = re.compile(pattern).search
    except (re.error, RecursionError, OverflowError) as error:
        raise _FaultError(f"the pattern is no regular expression: {error}", "correct `pattern`") from None
    return lambda question: [float(search(text) is not None) for text in question["completions"]]


# ---------------------------------------------------------------- a function of the user


def _function(path: str, text: str, function: str) -> Callable[..., Any]:
    module = ModuleType(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module  # where dataclasses and pickle look for what the file defines
    sys.path.insert(0, str(Path(path).parent))  # what lies beside the file can be imported, as of a script
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit, too
        raise _FaultError(_said(error, path, "cannot be imported"), "correct the file") from None
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        names = [name for name, each in vars(module).items() if inspect.isfunction(each) and each.__module__ == MODULE]
        hint = f"write `function = {json.dumps(names[0])}`" if names else f"write `def {function}` there"
        raise _FaultError(f"{path}: has no function `{function}`", hint)
    return found


def _call(function: Callable[..., Any], path: str, name: str) -> Score:
    def score(question: Question) -> list[float]:
        given = {**question["columns"], "prompts": question["prompts"], "completions": question["completions"]}
        _check_parameters(function, path, name, given)
        try:
            found = function(**given)
            is_list = isinstance(found, Iterable) and not isinstance(found, str | bytes | dict)
            values = [*found] if is_list else None
        except MemoryError:
            raise
        except BaseException as error:
            raise _FaultError(_said(error, path, f"`{name}` fails"), "correct it") from None
        if values is None:
            raise _FaultError(f"{path}: `{name}` returns no list, but {_kind(found)}", "return a list of numbers")
        return _numbers(values, len(question["completions"]), f"{path}: `{name}`")

    return score


def _check_parameters(function: Callable[..., Any], path: str, name: str, given: Mapping[str, Any]) -> None:
    """Raise _FaultError for a function that does not take what it is given."""
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        names = ", ".join(given)
        raise _FaultError(
            f"{path}: `{name}` does not take what it is given, {names}: {error}",
            f"write `def {name}(prompts, completions, **columns)`",
        ) from None
    except ValueError:  # a function of C that does not say what it takes
        return


def _numbers(values: Sequence[Any], count: int, who: str) -> list[float]:
    if len(values) != count:
        raise _FaultError(
            f"{who} returns {len(values)} values for {count} completions", "return a number for each completion"
        )
    found = []
    for at, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            said = f"{who} returns {_short(value)} for completion {at}, which is no finite number"
            raise _FaultError(said, "return 0.0 where nothing can be said")
        found.append(number)
    return found


def _short(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # a __repr__ of the user
        return _kind(value)


def _kind(value: object) -> str:
    return type(value).__name__


def _said(error: BaseException, path: str, what: str) -> str:
    """What went wrong, and at which line of the file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}:{error.offset}: {what}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{path}:{lines[-1]}: {what}: {text}" if lines else f"{path}: {what}: {text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
