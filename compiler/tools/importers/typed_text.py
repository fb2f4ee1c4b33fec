"""Texts of a configuration as values, their variables replaced; and values that are not known here.

A text is the number, the truth value or the text that it looks like. One that a program would have to be run for is
`Computed`: the ledger names it, and a warning its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsl.messages.diagnostics import Diagnostic
from dsl.messages.source import Span

VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(:?[-=](?:\$\{[^{}]*\}|[^{}])*)?\}|(\w+))")
UNKNOWN = re.compile(r"\$[\w({@*#?!$]|`")  # what stays of variables and commands
MOST_CHARACTERS = 100_000  # that replace variables of a text: they may double each other
WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class Computed:
    """A value that nothing is executed for, as it is written."""

    text: str


def replaced(text: str, variables: Mapping[str, str]) -> str:
    """A text with the values of variables. One that has none, and no default, stays, as do those that make it long."""
    left = MOST_CHARACTERS

    def value(match: re.Match[str]) -> str:
        nonlocal left
        found, default = variables.get(match[1] or match[3]), match[2]
        if default is not None and (found is None or (found == "" and default[0] == ":")):
            found = replaced(default.lstrip(":")[1:], variables)
        if found is None or len(found) > left:
            return match[0]
        left -= len(found)
        return found

    return VARIABLE.sub(value, text)


def is_known(text: str) -> bool:
    """Whether a text has no variables and commands of a shell."""
    return UNKNOWN.search(text) is None


def typed(text: str) -> Any:
    """A word as the number, the truth value, None or the text that it is."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text


def unknown(name: str, text: str, place: Span, written: str) -> Diagnostic:
    """A warning that a key is a text with variables that are not known. `written`: before any were replaced."""
    found = VARIABLE.search(written)
    hint = f"give it: -D {found[1] or found[3]}=VALUE" if found and not found[0].strip("${}").isdecimal() else ""
    message = f"`{name}` is {text[:80]}, and nothing is executed here"
    return Diagnostic("I0104", message, place, hint or "write its value", severity="warning")
