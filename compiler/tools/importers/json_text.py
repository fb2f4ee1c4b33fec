"""Parses JSON into values with source spans. Strict (RFC 8259): no NaN, no repeated key, no trailing comma."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from dsl.messages.diagnostics import Diagnostic, Note, Source, Span, SpecError

MAX_DEPTH = 32  # configurations nest about three deep
SPACE = re.compile(r"[ \t\n\r]*")
DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class JsonValue:
    """A value, its span, and the span of its key if it is a member of an object.

    value: bool, int, float, str, None, tuple[JsonValue, …], or Mapping[str, JsonValue]
    """

    value: Any
    span: Span
    key: Span | None = None


def parse(source: Source) -> JsonValue:
    """Parse a JSON text. Raises SpecError at the first position that is not JSON."""
    try:
        json.loads(source.text)
    except json.JSONDecodeError as error:
        raise _error(source, error.pos, f"this is not JSON: {error.msg}") from None
    except (RecursionError, ValueError):  # ValueError: an integer with more digits than Python parses
        raise _error(source, 0, "this is nested too deeply, or has too long a number, for a configuration") from None
    return _value(source, _behind_space(source, 0), 0)[0]


def _value(source: Source, offset: int, depth: int) -> tuple[JsonValue, int]:
    """The value that begins at an offset, and the offset of its end. The text is known to be valid JSON."""
    if source.text[offset] not in "{[":
        value, end = DECODER.raw_decode(source.text, offset)
        if isinstance(value, float) and not math.isfinite(value):
            message, hint = f"`{source.text[offset:end][:40]}` is not JSON", "write a finite number, or `null`"
            raise SpecError([Diagnostic("I0101", message, Span(source, offset, end), hint)])
        if isinstance(value, str):  # a lone surrogate becomes a replacement character
            value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return JsonValue(value, Span(source, offset, end)), end
    if depth == MAX_DEPTH:
        raise _error(source, offset, f"objects and lists are nested more than {MAX_DEPTH} deep")
    is_object, items, members = source.text[offset] == "{", list[JsonValue](), dict[str, JsonValue]()
    end = _behind_space(source, offset + 1)
    while source.text[end] not in "}]":
        name = None
        if is_object:
            name, end = _value(source, end, depth)
            end = _behind_space(source, _behind_space(source, end) + 1)  # behind the colon
        item, end = _value(source, end, depth + 1)
        if name is None:
            items.append(item)
        elif name.value in members:
            note = Note("first given here", members[name.value].key)
            message = f"`{name.value}` is given twice"
            raise SpecError([Diagnostic("I0102", message, name.span, "remove one of them", (note,))])
        else:
            members[name.value] = JsonValue(item.value, item.span, name.span)
        end = _behind_space(source, end)
        if source.text[end] == ",":
            end = _behind_space(source, end + 1)
    value = members if is_object else tuple(items)
    return JsonValue(value, Span(source, offset, end + 1)), end + 1


def _behind_space(source: Source, offset: int) -> int:
    space = SPACE.match(source.text, offset)
    assert space
    return space.end()


def _error(source: Source, offset: int, message: str) -> SpecError:
    offset = min(offset, max(0, len(source.text) - 1))
    return SpecError([Diagnostic("I0101", message, Span(source, offset, offset + 1))])
