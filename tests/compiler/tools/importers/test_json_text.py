"""The JSON reader accepts what Python's json module accepts, except extensions to RFC 8259."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compiler.tools.importers.json_text import MAX_DEPTH, JsonValue, parse
from dsl.messages.diagnostics import Source, SpecError

NUMBERS = st.integers(-(10**38), 10**38) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
PIECES = st.sampled_from(
    [*'{}[]:,"\\ \n\t', "1", "-", "0", ".5", "e9", "true", "null", "NaN", '"a"', "\\u00e9", "é", "/"]
)


def plain(value: JsonValue) -> Any:
    if isinstance(value.value, Mapping):
        return {key: plain(item) for key, item in value.value.items()}
    return [plain(item) for item in value.value] if isinstance(value.value, tuple) else value.value


def strict(text: str) -> Any:
    """json.loads without NaN, infinity (`1e999` too) and repeated keys. Raises ValueError."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("twice")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(word)

    def finite(digits: str) -> float:
        if math.isinf(float(digits)):
            raise ValueError(digits)
        return float(digits)

    return json.loads(text, object_pairs_hook=members, parse_constant=refuse, parse_float=finite)


@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_written_json_reads_back(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    root = parse(Source("c.json", text))
    assert plain(root) == value
    assert root.span.text == text


@given(st.lists(PIECES, max_size=14).map("".join))
@example('{"a": 1, "a": 1}')
@example('["\\ud800"]')
@example("[1,]")
@example("01")
@example("1.")
@example("-")
@example("1e999")
@example("")
@example("\ufeff1")
@example('"\x7f"')
@settings(max_examples=1000)
def test_accepts_exactly_valid_json(text: str) -> None:
    try:
        expected = strict(text)
    except ValueError:
        with pytest.raises(SpecError) as error:
            parse(Source("c.json", text))
        (item,) = error.value.diagnostics
        assert item.span is not None and 0 <= item.span.start <= len(text)
        assert re.match(r"error\[I010[12]\]", str(item))
    else:
        if "ud8" not in text:  # half a character becomes a replacement character
            assert plain(parse(Source("c.json", text))) == expected


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, 0, ""),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), MAX_DEPTH + 1, "nested more than 32 deep"),
        ("[" * 100_000 + "]" * 100_000, 1, "too deep"),
        ("1" * 5000, 1, "too long a number"),
        ("[1e309]", 2, "`1e309` is not JSON"),
        ('{"a": 1, "b": 2, "a": 3}', 18, "`a` is given twice"),
        ('["\n"]', 3, "Invalid control character"),
        ("{'a': 1}", 2, "property name enclosed in double quotes"),
        ('{"a": Infinity}', 7, "`Infinity` is not JSON"),
        ("{} {}", 4, "Extra data"),
    ],
)
def test_limits_and_places(text: str, column: int, message: str) -> None:
    if not message:
        parse(Source("c.json", text))
        return
    with pytest.raises(SpecError) as error:
        parse(Source("c.json", text))
    (item,) = error.value.diagnostics
    assert item.span is not None and item.span.column == column
    assert message in item.message
