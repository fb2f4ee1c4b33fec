"""Converts JSON to frozen dataclasses and back, by annotations: `pretty(read(Form, text))` is the text. No torch.

| annotation | in JSON |
|---|---|
| a dataclass | an object of exactly its fields; a field with its default value is left out |
| a NamedTuple, `tuple[A, B]` | an array of exactly these items |
| `tuple[A, ...]` | an array |
| `Mapping[str, A]` | an object of any keys |
| `Tree` | an object of any keys, whose values are not read by name |
| int, float, str, bool, Literal, `A \\| None` | themselves; a float may be written as an int |

Annotated limits a number to a NumberRange, a text to a Pattern. Anything else is a FormError that names the path: an
unknown, missing or repeated key, another type, a value out of range, a NaN, too deep nesting.
"""

from __future__ import annotations

import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from runtime.system.outcome import shorten

MAX_DEPTH = 32  # of a Tree
MAX_INT = (1 << 63) - 1
_MAX_FLOAT = sys.float_info.max

Tree = Mapping[str, Any]
Form = TypeVar("Form")
Reader = Callable[[Any, str], Any]  # (value, its path) → parsed value


@dataclass(frozen=True)
class NumberRange:
    """Inclusive bounds of a number."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Pattern:
    """Regular expression for a whole text. `.` matches any character, and \\w only ASCII."""

    text: str


class FormError(ValueError):
    """JSON does not have the expected form. The message says where."""


class NoJsonError(FormError):
    """A text is not JSON."""


class _PathError(Exception):
    """Path of a value in the text, and its error; `{thing}` stands for the kind of the text."""

    def __init__(self, path: str, words: str = "is not valid for {thing}") -> None:
        super().__init__(path, words)
        self.path, self.words = path, words


class _RepeatedKeys(dict[str, Any]):
    """A JSON object with a repeated `key`."""

    key = ""


def read(form: type[Form], text: str | bytes, thing: str) -> Form:
    """Parse a JSON text. `thing`: the kind of the text, for messages of FormError: "a plan"."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise NoJsonError("it is nested without end") from None
    except ValueError as error:
        raise NoJsonError(f"it is no JSON: {error}") from None
    try:
        result: Form = _reader(form)(value, "")
    except _PathError as fault:
        raise FormError(f"{shorten(fault.path) or 'it'} {fault.words.format(thing=thing)}") from None
    return result


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields_by_key = dict(pairs)
    if len(fields_by_key) < len(pairs):
        repeated, seen = _RepeatedKeys(fields_by_key), set[str]()
        repeated.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return repeated
    return fields_by_key


# ---------------------------------------------------------------- readers


def _reader(annotation: Any) -> Reader:
    return _build_reader(annotation)


@cache
def _build_reader(annotation: Any) -> Reader:
    """Return the reader of an annotation, which raises _PathError for invalid values."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bounded_reader(_reader(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        return _predicate_reader(lambda value: type(value) is str and value in arguments)
    if origin is tuple:
        return (
            _array(_reader(arguments[0]))
            if arguments[-1] is ...
            else _items(tuple, [_reader(argument) for argument in arguments])
        )
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        hints = get_type_hints(annotation, include_extras=True)
        return _items(annotation._make, [_reader(hint) for hint in hints.values()], hints)  # type: ignore[attr-defined]
    if is_dataclass(annotation):
        return _dataclass(annotation)
    if annotation == Tree:
        return _tree
    if isinstance(annotation, type) and issubclass(annotation, str) and annotation is not str:
        return _pattern_reader(annotation)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(arguments[1]))
    return _SCALARS[annotation]


def _predicate_reader(holds: Callable[[Any], bool]) -> Reader:
    def reader(value: Any, path: str) -> Any:
        if not holds(value):
            raise _PathError(path)
        return value

    return reader


def _pattern_reader(form: Any) -> Reader:
    """Return the reader of a str subclass, whose `pattern` the text must match."""
    fullmatch = re.compile(form.pattern, re.ASCII).fullmatch

    def reader(value: Any, path: str) -> Any:
        if type(value) is not str or not fullmatch(value):
            raise _PathError(path)
        return form(value)

    return reader


def _int(value: Any, path: str) -> Any:
    if type(value) is not int or not -MAX_INT <= value <= MAX_INT:
        raise _PathError(path)
    return value


def _number(value: Any, path: str) -> Any:
    if type(value) is float and not math.isfinite(value):
        raise _PathError(path, "is not a number")
    if type(value) not in (int, float) or abs(value) > _MAX_FLOAT:  # an int may be too large for a float
        raise _PathError(path)
    return value


_SCALARS: Mapping[Any, Reader] = {
    int: _int,
    float: _number,
    str: _predicate_reader(lambda value: type(value) is str),
    bool: _predicate_reader(lambda value: type(value) is bool),
    type(None): _predicate_reader(lambda value: value is None),
}


def _bounded_reader(inner: Reader, bounds: tuple[Any, ...]) -> Reader:
    """Return a reader that checks the result of `inner` with one NumberRange or Pattern."""
    (bound,) = bounds
    if isinstance(bound, NumberRange):
        low, high = bound.low, bound.high

        def read_in_range(value: Any, path: str) -> Any:
            result = inner(value, path)
            if not low <= result <= high:
                raise _PathError(path)
            return result

        return read_in_range
    fullmatch = re.compile(bound.text, re.ASCII | re.DOTALL).fullmatch

    def read_matching(value: Any, path: str) -> Any:
        result = inner(value, path)
        if not fullmatch(result):
            raise _PathError(path)
        return result

    return read_matching


def _union(alternatives: tuple[Any, ...]) -> Reader:
    """Return the reader of a union: an object, None, and numbers or one other form."""
    objects = [_reader(form) for form in alternatives if is_dataclass(form)]
    others = {form: _reader(form) for form in alternatives if form is not type(None) and not is_dataclass(form)}
    optional = type(None) in alternatives
    assert len(objects) <= 1 and (len(others) <= 1 or others.keys() <= {int, float, bool}), alternatives

    def reader(value: Any, path: str) -> Any:
        if value is None and optional:
            return None
        if objects and (isinstance(value, dict) or not others):
            return objects[0](value, path)
        read_value = others[type(value)] if type(value) in others else next(iter(others.values()))
        return read_value(value, path)

    return reader


def _array(item: Reader) -> Reader:
    def reader(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise _PathError(path)
        return tuple([item(element, path) for element in value])

    return reader


def _items(make: Callable[[Any], Any], items: list[Reader], names: Iterable[str] = ()) -> Reader:
    readers = list(zip(items, list(names) or [""] * len(items), strict=True))

    def reader(value: Any, path: str) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise _PathError(path)
        pairs = zip(value, readers, strict=True)
        return make([read_value(item, _below(path, name) if name else path) for item, (read_value, name) in pairs])

    return reader


def _mapping(item: Reader) -> Reader:
    def reader(value: Any, path: str) -> Any:
        _check_object(value, path)
        return {key: item(element, _below(path, key)) for key, element in value.items()}

    return reader


def _dataclass(form: Any) -> Reader:
    hints = get_type_hints(form, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in fields(form)}
    defaults = {field.name: field.default for field in fields(form)}

    def reader(value: Any, path: str) -> Any:
        _check_object(value, path)
        for key in value:
            if key not in readers:
                raise _PathError(_below(path, key), "is not a key of {thing}")
        values = {}
        for key, read_value in readers.items():
            if key not in value and defaults[key] is not MISSING:
                continue
            values[key] = read_value(value[key], _below(path, key)) if key in value else MISSING
            if values[key] == defaults[key]:  # missing, or a default that should have been left out
                raise _PathError(_below(path, key))
        return form(**values)

    return reader


def _tree(value: Any, path: str) -> Any:
    _check_object(value, path)
    _check_tree(value, path, 0)
    return value


def _check_tree(value: Any, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _PathError(path)
    if isinstance(value, dict):
        _check_object(value, path)
        for key, element in value.items():
            _check_tree(element, _below(path, key), depth + 1)
    elif isinstance(value, list):
        for element in value:
            _check_tree(element, path, depth + 1)
    elif type(value) in (int, float):
        _SCALARS[type(value)](value, path)


def _check_object(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise _PathError(path)
    if isinstance(value, _RepeatedKeys):
        raise _PathError(_below(path, value.key), "is there twice")


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# ---------------------------------------------------------------- writing

_WIDTH = 110  # of a line of JSON
_quoted = json.JSONEncoder().encode  # like json.dumps, without its overhead


def tree(data: Any) -> Any:
    """Convert a value to nested dicts and lists, like `json.loads` of its text."""
    if is_dataclass(data) or isinstance(data, Mapping):
        return {key: tree(element) for key, element in _pairs(data)}
    return [tree(element) for element in data] if isinstance(data, list | tuple) else data


def pretty(data: Any) -> str:
    """Render readable JSON: a value that fits is on one line, others have a line per item; keys keep their order."""
    return _text(data, 0) + "\n"


def _pairs(data: Any) -> Any:
    """Return the keys and values of a JSON object."""
    if isinstance(data, Mapping):
        return data.items()
    form: Any = type(data)
    required, optional = _keys(form)
    values = {key: getattr(data, key) for key in required}
    for key, default in optional:
        if (value := getattr(data, key)) != default:
            values[key] = value
    return values.items()


@cache
def _keys(form: Any) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return the names of the fields without a default, and (name, default) of those with one, which follow them."""
    required = [field.name for field in fields(form) if field.default is MISSING]
    return required, [(field.name, field.default) for field in fields(form) if field.default is not MISSING]


def _text(data: Any, depth: int) -> str:
    # If a value fits on a line, so do its items. So the texts of items are rendered first, each once.
    if isinstance(data, str):
        return _quoted(data)
    if data is None or isinstance(data, int | float):
        return _scalar(data)
    if isinstance(data, list | tuple):
        begin, end = "[", "]"
        items = [str(element) if type(element) is int else _text(element, depth + 1) for element in data]
    else:
        begin, end = "{", "}"
        items = [f"{_key(key)}: {_text(element, depth + 1)}" for key, element in _pairs(data)]
    if 3 * len(items) + depth <= _WIDTH:  # an item has at least three characters
        line = ", ".join(items)
        if len(line) + 2 + depth <= _WIDTH and "\n" not in line:
            return begin + line + end
    pad = "\n" + " " * (depth + 1)
    return begin + pad + f",{pad}".join(items) + "\n" + " " * depth + end


@lru_cache(maxsize=None, typed=True)
def _scalar(value: float | None) -> str:
    return json.dumps(value)


@cache
def _key(name: str) -> str:
    return json.dumps(name)
