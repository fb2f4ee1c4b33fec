"""Reads text files that a user names, and JSON or Python in them, with limits on size and clear errors."""

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

MOST_DIGITS = 4_000  # of an integer in JSON; Python stops at 4,300, with a message for programmers


class TextFileError(ValueError):
    """Raised if a file cannot be read. The message names the file."""


def read_text(path: Path, most_bytes: int, display_name: str = "") -> str:
    """Read a UTF-8 file, without a byte order mark. `display_name`: its name in messages, by default its path."""
    display_name = display_name or str(path)
    try:
        return read_bytes(path, most_bytes, display_name).decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        raise TextFileError(f"{display_name} is not text in UTF-8") from None


def read_bytes(path: Path, most_bytes: int, display_name: str = "") -> bytes:
    """Read a regular file. Raises TextFileError, as `read_text` does."""
    display_name = display_name or str(path)
    try:
        if not path.is_file():  # opening a pipe would block
            raise TextFileError(_reason_unreadable(path, display_name))
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise TextFileError(f"{display_name}: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, TextFileError):
            raise
        raise TextFileError(f"there is no file {display_name!r}") from None  # a NUL in the path
    if len(data) > most_bytes:
        raise TextFileError(f"{display_name} is larger than {most_bytes >> 20} MiB")
    return data


def _reason_unreadable(path: Path, display_name: str) -> str:
    if path.is_dir():
        return f"{display_name} is not a regular file, but a folder"
    if path.exists():
        return f"{display_name} is not a regular file"
    return f"{display_name} is a broken link" if path.is_symlink() else f"there is no file {display_name}"


def json_of(text: str, display_name: str, number: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON strictly: no NaN, no repeated keys. Raises TextFileError, which names the line and column.

    `number`: parses numbers instead of int and float; it raises ValueError for one that it does not take.
    """
    integer, real, constant = (
        (_wrap_parser(number),) * 3 if number else (_wrap_parser(_integer), float, _wrap_parser(_no_number))
    )
    try:
        return json.loads(text, parse_int=integer, parse_float=real, parse_constant=constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise TextFileError(f"{display_name}:{error.lineno}:{error.colno}: this is not JSON: {error.msg}") from None
    except RecursionError:
        raise TextFileError(f"{display_name}: it is nested too deep") from None
    except _WordError as error:
        offset = next(token.start() for token in _TOKEN.finditer(text) if token[0].startswith(error.word))
        raise TextFileError(f"{_place(display_name, text, offset)}: {error}") from None
    except _RepeatedError:
        offset, name = _first_repeated_key(text)
        raise TextFileError(f"{_place(display_name, text, offset)}: `{name[:40]}` is given twice") from None


def python_of(text: str) -> ast.Module:
    """Parse Python without running it. Raises SyntaxError for every text that Python cannot parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # their messages do not name the file
            return ast.parse(text)
    except (RecursionError, MemoryError):  # limits of the parser; memory is not full
        raise SyntaxError("it is nested too deep") from None
    except ValueError as error:  # a NUL
        raise SyntaxError(str(error)) from None


def read_form(path: Path, most_bytes: int, form: type[Form]) -> Form:
    """Read a JSON file into a pydantic model. Raises TextFileError, which names the file and the key."""
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
    """A word of a text is refused. The message is the reason."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(reason)
        self.word = word


def _wrap_parser(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser of words so that its ValueError becomes a _WordError with the word."""

    def reader(word: str) -> Any:
        try:
            return read(word)
        except ValueError as error:
            raise _WordError(word, str(error)) from None

    return reader


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits is too large")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) < len(pairs):
        raise _RepeatedError
    return items


def _first_repeated_key(text: str) -> tuple[int, str]:
    """The position of the first repeated key of an object in a JSON text, and the key."""
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
    raise AssertionError("no key is repeated")


def _place(display_name: str, text: str, offset: int) -> str:
    """`file:line:column` of a character."""
    return f"{display_name}:{text.count(chr(10), 0, offset) + 1}:{offset - text.rfind(chr(10), 0, offset)}"


def object_of(value: Any, types: Mapping[str, type], name: str) -> dict[str, Any]:
    """Return the value if it is a JSON object with only these keys, else raise ValueError. `name`: of the value."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object of {', '.join(types)}")
    for key, item in value.items():
        if key not in types:
            raise ValueError(f"{name} has an unknown key {key[:40]!r}: use {', '.join(types)}")
        if not isinstance(item, types[key]):
            word = {"dict": "an object", "list": "a list", "Fraction": "a number"}[types[key].__name__]
            raise ValueError(f'{name}: "{key}" must be {word}')
    return dict(value)
