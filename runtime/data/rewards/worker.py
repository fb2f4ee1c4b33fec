"""A reward that is code, in a process with limits (runtime/system/limited.py): `python -P -m
runtime.data.rewards.worker BYTES`.

A function of the user may hang, print, end its process or fill memory, and a regular expression may backtrack without
end. So both run here.

The first question has {"pattern"} of a regular expression, or {"path", "text", "function", "imports_from"} of a file of
Python: the path for messages, and the folder whose files it may import, or null. Then comes one for each call,
{"prompts", "completions", "columns"}, with the answer {"values": [a number for each completion]}.
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
MOST = 1e30  # of a reward, whose square is summed
MODULE = "reward"  # the name of the user's file as a module


def main(argv: list[str]) -> int:
    return serve(int(argv[0]), _begin)


def _begin(what: Question) -> Callable[[Question], Mapping[str, Any]]:
    score = _score_of(what)
    return lambda question: {"values": score(question)}


def _score_of(what: Question) -> Score:
    if "pattern" in what:
        return _search(what["pattern"])
    return _call(_function(**what), what["path"], what["function"])


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
    sys.modules[MODULE] = module  # where dataclasses and pickle look for what the file defines
    if imports_from is not None:
        sys.path.insert(0, imports_from)  # what lies beside the file, as of a script
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except MemoryError:
        raise
    except BaseException as error:  # SystemExit, too
        raise FaultError(_said(error, path, "cannot be imported"), "correct the file") from None
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        names = [name for name, each in vars(module).items() if inspect.isfunction(each) and each.__module__ == MODULE]
        hint = f"write `function = {json.dumps(names[0])}`" if names else f"write `def {function}` there"
        raise FaultError(f"{path}: has no function `{function}`", hint)
    return found


def _call(function: Callable[..., Any], path: str, name: str) -> Score:
    def score(question: Question) -> list[float]:
        given = {**question["columns"], "prompts": question["prompts"], "completions": question["completions"]}
        _check_parameters(function, path, name, given)
        count = len(question["completions"])  # the function may change the list
        try:
            found = function(**given)
            is_list = isinstance(found, Iterable) and not isinstance(found, str | bytes | dict)
            values = [*found] if is_list else None
        except MemoryError:
            raise
        except BaseException as error:
            raise FaultError(_said(error, path, f"`{name}` fails"), "correct it") from None
        if values is None:
            raise FaultError(f"{path}: `{name}` returns no list, but {_kind(found)}", "return a list of numbers")
        return _numbers(values, count, f"{path}: `{name}`")

    return score


def _check_parameters(function: Callable[..., Any], path: str, name: str, given: Mapping[str, Any]) -> None:
    """Raise FaultError for a function that does not take what it is given."""
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        names = ", ".join(given)
        raise FaultError(
            f"{path}: `{name}` does not take what it is given, {names}: {error}",
            f"write `def {name}(prompts, completions, **columns)`",
        ) from None
    except ValueError:  # a function of C that does not say what it takes
        return


def _numbers(values: Sequence[Any], count: int, who: str) -> list[float]:
    if len(values) != count:
        raise FaultError(
            f"{who} returns {len(values)} values for {count} completions", "return a number for each completion"
        )
    found = []
    for at, value in enumerate(values):
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MOST:  # nor is NaN
            said = f"{who} returns {_short(value)} for completion {at}, which is no number from {-MOST:g} to {MOST:g}"
            raise FaultError(said, "return 0.0 where nothing can be said")
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
