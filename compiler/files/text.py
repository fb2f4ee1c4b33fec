"""Reading a text file that a user names, and JSON or Python in it: bounded, and with a reason where there is none."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

Form = TypeVar("Form", bound="BaseModel")

MOST_DIGITS = 4_000  # of a whole number in JSON; Python stops at 4,300, with advice for who programs in it


class TextFileError(ValueError):
    """Why a file cannot be read as text; the message names it."""


def read_text(path: Path, most_bytes: int, shown: str = "") -> str:
    """The text of a file in UTF-8, without a byte order mark. `shown`: what messages call the file, else its path."""
    shown = shown or str(path)
    try:
        return read_bytes(path, most_bytes, shown).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise TextFileError(f"{shown} is not text in UTF-8") from None


def read_bytes(path: Path, most_bytes: int, shown: str = "") -> bytes:
    """The bytes of a regular file; TextFileError as `read_text` raises it."""
    shown = shown or str(path)
    try:
        if not path.is_file():  # nor a pipe, which would be waited for
            raise TextFileError(_why_none(path, shown))
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise TextFileError(f"{shown}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, TextFileError):
            raise
        raise TextFileError(f"there is no file {shown!r}") from None  # a NUL in the path
    if len(data) > most_bytes:
        raise TextFileError(f"{shown} is larger than {most_bytes >> 20} MiB")
    return data


def _why_none(path: Path, shown: str) -> str:
    if path.is_dir():
        return f"{shown} is no regular file, but a folder"
    if path.exists():
        return f"{shown} is no regular file"
    return f"{shown} is a link that leads to no file" if path.is_symlink() else f"there is no file {shown}"


def json_of(text: str, shown: str, number: Callable[[str], Any] | None = None) -> Any:
    """The document that a text is, as the standard has it: no NaN, and no key twice. TextFileError names the place.

    `number`: what reads numbers in the place of int and float; it raises ValueError for one that it does not take.
    """
    whole, real, other = (_placed(number),) * 3 if number else (_placed(_whole), float, _placed(_no_number))
    try:
        return json.loads(text, parse_int=whole, parse_float=real, parse_constant=other, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise TextFileError(f"{shown}:{error.lineno}:{error.colno}: this is not JSON: {error.msg}") from None
    except RecursionError:
        raise TextFileError(f"{shown}: it is nested too deep") from None
    except _WordError as error:
        at = next(each.start() for each in _TOKEN.finditer(text) if each[0].startswith(error.word))
        raise TextFileError(f"{_place(shown, text, at)}: {error}") from None
    except _RepeatedError:
        at, name = _repeated(text)
        raise TextFileError(f"{_place(shown, text, at)}: `{name[:40]}` is given twice") from None


def python_of(text: str) -> ast.Module:
    """The statements of a text of Python, which is not run. SyntaxError for every text that Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they name no file
            return ast.parse(text)
    except (RecursionError, MemoryError):  # the parser's own limits, at which its memory is far from full
        raise SyntaxError("it is nested too deep") from None
    except ValueError as error:  # a NUL
        raise SyntaxError(str(error)) from None


def read_form(path: Path, most_bytes: int, form: type[Form]) -> Form:
    """The value of a JSON file that has the form of a pydantic model. TextFileError names the file and the place."""
    from pydantic import ValidationError

    value = json_of(read_text(path, most_bytes), str(path))
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        raise TextFileError(f"{path}: {f'`{place}`: ' if place else ''}{first['msg']}") from None


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?P<colon>\s*:)?|[{}]|[^\s,:\[\]{}"]+')


class _RepeatedError(Exception):
    """An object has a key twice."""


class _WordError(Exception):
    """A word of a text that is not taken, and why."""

    def __init__(self, word: str, why: str) -> None:
        super().__init__(why)
        self.word = word


def _placed(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """What reads a word, whose ValueError becomes one that knows the word."""

    def reader(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise _WordError(word, str(error)) from None

    return reader


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits is too large")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _RepeatedError
    return found


def _repeated(text: str) -> tuple[int, str]:
    """Where a text of JSON has the first key that its object has before, and the key."""
    objects: list[set[str]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "{":
            objects.append(set())
        elif token[0] == "}":
            objects.pop()
        elif token["colon"]:
            name = json.loads(token[0].removesuffix(token["colon"]))
            if name in objects[-1]:
                return token.start(), name
            objects[-1].add(name)
    raise AssertionError("no key is there twice")


def _place(shown: str, text: str, at: int) -> str:
    """file:line:column of a character."""
    return f"{shown}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def object_of(value: Any, types: Mapping[str, type], what: str) -> dict[str, Any]:
    """The value, which must be a JSON object of some of these keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be an object of {', '.join(types)}")
    for key, item in value.items():
        if key not in types:
            raise ValueError(f"{what} has an unknown key {key[:40]!r}: use {', '.join(types)}")
        if not isinstance(item, types[key]):
            word = {"dict": "an object", "list": "a list", "Fraction": "a number"}[types[key].__name__]
            raise ValueError(f'{what}: "{key}" must be {word}')
    return dict(value)
