"""JSON text → values that know their place. Strict (RFC 8259): no NaN, no repeated key, no trailing comma."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsl.messages.diagnostics import Diagnostic, Note, Source, Span, SpecError

MAX_DEPTH = 32  # a configuration is three deep
MAX_NUMBER = 40  # characters, as in a spec

SPACE = re.compile(r"[ \t\n\r]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
WORD = re.compile(r"[^\s,:\[\]{}\"]+")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
WORDS = {"true": True, "false": False, "null": None}
ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class JsonValue:
    """A value, its place, and, where it is a member of an object, the place of its key.

    value: bool, int, float, str, None, tuple[Json, …], or Mapping[str, Json]
    """

    value: Any
    span: Span
    key: Span | None = None


def parse(source: Source) -> JsonValue:
    """The value a text stands for. Raises SpecError with the first place that is not JSON."""
    return _JsonReader(source).document()


class _JsonReader:
    """Recursive descent; `at` is the next character."""

    def __init__(self, source: Source) -> None:
        self.source, self.text, self.at = source, source.text, 0

    def document(self) -> JsonValue:
        self._skip()
        value = self._value(0)
        self._skip()
        if self.at < len(self.text):
            raise self._error("the JSON value ends before this", hint="remove what follows it")
        return value

    def _value(self, depth: int) -> JsonValue:
        start, character = self.at, self.text[self.at : self.at + 1]
        if character and character in "{[":
            if depth == MAX_DEPTH:
                raise self._error(f"objects and lists are nested more than {MAX_DEPTH} deep")
            value: Any = self._object(depth + 1) if character == "{" else self._list(depth + 1)
        elif character == '"':
            value = self._string()
        elif not character:
            raise self._error("the text ends where a value should be")
        else:
            value = self._word()
        return JsonValue(value, Span(self.source, start, self.at))

    def _object(self, depth: int) -> Mapping[str, JsonValue]:
        members: dict[str, JsonValue] = {}
        self.at += 1
        self._skip()
        while not self._take("}"):
            if members:
                self._expect(",", "`,` or `}`")
                self._skip()
            start = self.at
            if self.text[start : start + 1] != '"':
                raise self._error("a key in double quotes should be here", hint=self._comma_hint(start, "}"))
            name = self._string()
            key = Span(self.source, start, self.at)
            self._skip()
            self._expect(":", "`:`")
            self._skip()
            value = self._value(depth)
            if name in members:
                note = Note("it is given here first", members[name].key)
                message = f"`{name}` is given twice"
                raise SpecError([Diagnostic("I0102", message, key, "remove one of them", (note,))])
            members[name] = JsonValue(value.value, value.span, key)
            self._skip()
        return members

    def _list(self, depth: int) -> tuple[JsonValue, ...]:
        items: list[JsonValue] = []
        self.at += 1
        self._skip()
        while not self._take("]"):
            if items:
                self._expect(",", "`,` or `]`")
                self._skip()
                if self.text[self.at : self.at + 1] == "]":
                    raise self._error("a value should be here", hint=self._comma_hint(self.at, "]"))
            items.append(self._value(depth))
            self._skip()
        return tuple(items)

    def _string(self) -> str:
        start, parts = self.at, []
        self.at += 1
        while True:
            plain = PLAIN.match(self.text, self.at)
            assert plain
            parts.append(plain[0])
            self.at = plain.end()
            character = self.text[self.at : self.at + 1]
            if character == '"':
                self.at += 1
                return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if character != "\\":
                self.at = start
                raise self._error("this string is not closed on its line", hint='close it with `"`')
            parts.append(self._escape())

    def _escape(self) -> str:
        letter, digits = self.text[self.at + 1 : self.at + 2], self.text[self.at + 2 : self.at + 6]
        if letter in ESCAPES and letter:
            self.at += 2
            return ESCAPES[letter]
        if letter != "u" or not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self._error("an escape that JSON does not have", 2)
        self.at += 6
        return chr(int(digits, 16))

    def _word(self) -> bool | int | float | None:
        number = NUMBER.match(self.text, self.at)
        word = WORD.match(self.text, self.at)
        shown = word[0] if word else self.text[self.at]
        if shown in WORDS:
            self.at += len(shown)
            return WORDS[shown]
        if number is None or number[0] != shown:
            raise self._error(f"`{shown[:MAX_NUMBER]}` is not JSON", len(shown), _word_hint(shown))
        value = float(shown) if number[1] or number[2] else None
        if len(shown) > MAX_NUMBER or value in (float("inf"), float("-inf")):
            raise self._error(f"a number of at most {MAX_NUMBER} characters and 1e308 should be here", len(shown))
        self.at += len(shown)
        return int(shown) if value is None else value

    def _skip(self) -> None:
        space = SPACE.match(self.text, self.at)
        assert space
        self.at = space.end()

    def _take(self, character: str) -> bool:
        found = self.text[self.at : self.at + 1] == character
        self.at += found
        return found

    def _expect(self, character: str, shown: str) -> None:
        if not self._take(character):
            raise self._error(f"{shown} should be here")

    def _comma_hint(self, at: int, end: str) -> str:
        trailing = self.text[:at].rstrip().endswith(",") and self.text[at : at + 1] == end
        return "remove the comma before it" if trailing else ""

    def _error(self, message: str, length: int = 1, hint: str = "") -> SpecError:
        at = min(self.at, max(0, len(self.text) - 1))
        return SpecError([Diagnostic("I0101", message, Span(self.source, at, at + length), hint)])


def _word_hint(word: str) -> str:
    if word.lower() in WORDS or word == "None":
        return f"write `{'null' if word == 'None' else word.lower()}`"
    if word.lstrip("-") in ("NaN", "Infinity"):
        return "write the number that is meant, or `null`"
    return ""
