"""The tokenizer and the LALR(1) parser, both driven by a table that lark generates from grammar.lark.

The table is stored in the package as `grammar.json`: reading it takes 0.5 ms, generating it 24 ms. After a change of
the grammar, regenerate it with `python -m dsl.text.make_table`; a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

END = "$END"
NO_STATE = 1 << 20  # above every state


class Token(NamedTuple):
    """Characters `start` to `end` (not included) of a text, and their terminal of the grammar."""

    type: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class GrammarRule:
    """A reduction of the `length` values at the top of the stack to one."""

    origin: str
    length: int
    spread: tuple[int, ...]  # indices of values that are lists, to be inlined
    method: str  # of the builder; "" keeps the single value, "*" makes a list


@dataclass(frozen=True)
class ParseTable:
    """States of the parser: symbol → next state, or the complement (~) of the rule's index for a reduction."""

    pattern: re.Pattern[str]
    ignored: frozenset[str]
    rules: tuple[GrammarRule, ...]
    states: tuple[dict[str, int], ...]
    start: int
    end: int


@cache
def load() -> ParseTable:
    """Load the table from `grammar.json`."""
    data = json.loads(Path(__file__).with_name("grammar.json").read_text("utf-8"))
    rules = tuple(
        GrammarRule(origin, length, tuple(spread), method) for origin, length, spread, method in data["rules"]
    )
    ignored, states = frozenset(data["ignored"]), tuple(data["states"])
    return ParseTable(re.compile(data["pattern"]), ignored, rules, states, data["start"], data["end"])


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a text. Every character belongs to one, or to a blank or comment between two."""
    table = load()
    for match in table.pattern.finditer(text):
        kind = match.lastgroup
        assert kind is not None
        if kind not in table.ignored:
            yield Token(kind, match[0], match.start(), match.end())


class UnexpectedError(Exception):
    """A token is not allowed at its position. `accepts`: the terminals that are."""

    def __init__(self, accepts: frozenset[str]) -> None:
        self.accepts = accepts
        super().__init__(f"one of {sorted(accepts)} was expected")


class TableParser:
    """An LALR(1) parser with a stack of states and values. Reductions call the method of `builder` named like the
    rule."""

    def __init__(self, builder: object) -> None:
        table = load()
        self._states, self._rules, self._end = table.states, table.rules, table.end
        self._methods: tuple[Callable[..., Any] | None, ...] = tuple(
            getattr(builder, rule.method) if rule.method not in ("", "*") else None for rule in table.rules
        )
        self._stack = [table.start]
        self._values: list[Any] = []

    def copy_state(self) -> tuple[list[int], list[Any]]:
        """Return the state of the parser, for `restore`."""
        return self._stack.copy(), self._values.copy()

    def restore(self, saved: tuple[list[int], list[Any]]) -> None:
        """Go back to a saved state."""
        self._stack, self._values = saved[0].copy(), saved[1].copy()

    def feed(self, token: Token) -> None:
        """Feed one token. Raises UnexpectedError; after that, only `restore` is possible."""
        before: list[int] | None = None
        while (action := self._states[self._stack[-1]].get(token.type, NO_STATE)) < 0:
            before = before or self._stack.copy()
            self._reduce(~action)
        if action == NO_STATE:
            raise UnexpectedError(self._accepted_terminals(before or self._stack))
        self._stack.append(action)
        self._values.append(token)

    def finish(self) -> Any:
        """End the text and return its value."""
        while self._stack[-1] != self._end:
            action = self._states[self._stack[-1]].get(END)
            if action is None:
                raise UnexpectedError(self._accepted_terminals(self._stack))
            self._reduce(~action)
        return self._values[-1]

    def _reduce(self, index: int) -> None:
        rule, method = self._rules[index], self._methods[index]
        parts: list[Any] = []
        if rule.length:
            parts = self._values[-rule.length :]
            del self._values[-rule.length :], self._stack[-rule.length :]
        if rule.spread:
            parts = _inline_lists(parts, rule.spread)
        value = method(*parts) if method is not None else parts if rule.method else parts[0]
        self._stack.append(self._states[self._stack[-1]][rule.origin])
        self._values.append(value)

    def _accepted_terminals(self, stack: list[int]) -> frozenset[str]:
        """The terminals that can be fed in a stack of states."""
        names = (name for name in self._states[stack[-1]] if name.isupper())
        return frozenset(name for name in (*names, END) if self._is_accepted(stack.copy(), name))

    def _is_accepted(self, stack: list[int], name: str) -> bool:
        while name != END or stack[-1] != self._end:
            action = self._states[stack[-1]].get(name)
            if action is None or action >= 0:
                return action is not None
            rule = self._rules[~action]
            del stack[len(stack) - rule.length :]
            stack.append(self._states[stack[-1]][rule.origin])
        return True


def _inline_lists(parts: list[Any], spread: tuple[int, ...]) -> list[Any]:
    """Inline the lists among values. A list in first place is extended, so that long texts take linear time."""
    values: list[Any] = parts[0] if spread[0] == 0 else [parts[0]]
    for index, part in enumerate(parts[1:], 1):
        if index in spread:
            values.extend(part)
        else:
            values.append(part)
    return values
