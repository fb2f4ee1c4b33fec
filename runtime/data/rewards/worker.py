"""Runs a reward that is code, in a process with limits (runtime/system/limited.py): `python -P -m
runtime.data.rewards.worker BYTES [FOLDER]`.

A function of the user may hang, print, exit or fill memory, and a regular expression may backtrack without end. So both
run here.

The first question has {"pattern"} for a regular expression, or {"path", "text", "function", "imports_from"} for a
Python file: the path is for messages, and `imports_from` is the folder whose files it may import, or null. Each further
question is a call, {"prompts", "completions", "columns"}, with the answer {"values": [a number for each completion]}.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from runtime.system.limited import FaultError, serve

Question = Mapping[str, Any]
Score = Callable[[Question], list[float]]
MAX_REWARD = 1e30  # largest reward; squares are summed
MODULE = "reward"  # the name of the user's file as a module


def main(argv: list[str]) -> int:
    return serve(argv, _begin)


def _begin(code: Question) -> Callable[[Question], Mapping[str, Any]]:
    score = _score_of(code)
    return lambda question: {"values": score(question)}


def _score_of(code: Question) -> Score:
    if "pattern" in code:
        return _search(code["pattern"])
    return _call(_function(**code), code["path"], code["function"])


# ---------------------------------------------------------------- a regular expression


def _search(pattern: str) -> Score:
    try:
        search = re.compile(pattern).search
    except (re.error, RecursionError, OverflowError) as error:
        raise FaultError(f"the pattern is no regular expression: {error}", "correct `pattern`") from None
    return lambda question: [float(search(text) is not None) for text in question["completions"]]


# ---------------------------------------------------------------- a function of the user


def _function(path: str, text: str, function: str, imports_from: str | None) -> Callable[..., Any]:
    module = ModuleType(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module  # dataclasses and pickle look up the definitions of the file here
    if imports_from is not None:
        sys.path.insert(0, imports_from)  # files next to it, as for a script
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except MemoryError:
        raise
    except BaseException as error:  # includes SystemExit
        raise FaultError(_message(error, path, "cannot be imported"), "correct the file") from None
    reward_function: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(reward_function):
        names = [
            name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == MODULE
        ]
        hint = f"write `function = {json.dumps(names[0])}`" if names else f"write `def {function}` there"
        raise FaultError(f"{path}: has no function `{function}`", hint)
    return reward_function


def _call(function: Callable[..., Any], path: str, name: str) -> Score:
    def score(question: Question) -> list[float]:
        arguments = {**question["columns"], "prompts": question["prompts"], "completions": question["completions"]}
        _check_parameters(function, path, name, arguments)
        count = len(question["completions"])  # the function may change the list
        try:
            result = function(**arguments)
            is_list = isinstance(result, Iterable) and not isinstance(result, str | bytes | dict)
            values = [*result] if is_list else None
        except MemoryError:
            raise
        except BaseException as error:
            raise FaultError(_message(error, path, f"`{name}` fails"), "correct it") from None
        if values is None:
            raise FaultError(f"{path}: `{name}` returns no list, but {_kind(result)}", "return a list of numbers")
        return _numbers(values, count, f"{path}: `{name}`")

    return score


def _check_parameters(function: Callable[..., Any], path: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Raise FaultError if a function does not accept the arguments."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments)
        raise FaultError(
            f"{path}: `{name}` does not accept its arguments, {names}: {error}",
            f"write `def {name}(prompts, completions, **columns)`",
        ) from None
    except ValueError:  # a C function without a signature
        return


def _numbers(values: Sequence[Any], count: int, name: str) -> list[float]:
    if len(values) != count:
        raise FaultError(
            f"{name} returns {len(values)} values for {count} completions", "return a number for each completion"
        )
    numbers = []
    for row, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MAX_REWARD:  # also for NaN
            fault = (
                f"{name} returns {_short(value)} for completion {row}, "
                f"which is no number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
            )
            raise FaultError(fault, "return 0.0 for a completion without a score")
        numbers.append(number)
    return numbers


def _short(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # a __repr__ of the user
        return _kind(value)


def _kind(value: object) -> str:
    return type(value).__name__


def _message(error: BaseException, path: str, problem: str) -> str:
    """Return the error, with its line in the file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}:{error.offset}: {problem}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    text = traceback.format_exception_only(error)[-1].strip()
    return f"{path}:{lines[-1]}: {problem}: {text}" if lines else f"{path}: {problem}: {text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
