"""Python as text: calls whose arguments are values. Nothing of a spec becomes code: a value is written by `repr`."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INDENT, WIDTH = "    ", 88


@dataclass(frozen=True)
class Code:
    """An expression that an exporter wrote itself, such as the name of a class."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a function by its name, with arguments by name."""

    function: str
    arguments: Mapping[str, Any]


def rendered(value: Any, indent: str = "") -> str:
    """The text of a value. TypeError for one that is no number, text, None, list, tuple, mapping, `Call` or `Code`."""
    if isinstance(value, Code):
        return value.text
    if isinstance(value, Call):
        return _wrapped(f"{value.function}(", [(f"{k}=", v) for k, v in value.arguments.items()], ")", indent)
    if isinstance(value, Mapping):
        return _wrapped("{", [(f"{rendered(key)}: ", each) for key, each in value.items()], "}", indent)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        ends = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        return _wrapped(ends[0], [("", each) for each in value], ends[1], indent)
    if type(value) is float and not math.isfinite(value):
        raise TypeError(f"{value} has no literal")
    if value is None or type(value) in (bool, int, float, str):
        return ascii(value)
    raise TypeError(f"{type(value).__name__} is no value of a configuration")


def _wrapped(head: str, items: Sequence[tuple[str, Any]], tail: str, indent: str) -> str:
    """On one line where that is short enough, else an item a line."""
    one = head + ", ".join(before + rendered(value) for before, value in items) + tail
    if "\n" not in one and len(indent) + len(one) <= WIDTH:
        return one
    inner = indent + INDENT
    lines = "".join(f"{inner}{before}{rendered(value, inner)},\n" for before, value in items)
    return f"{head}\n{lines}{indent}{tail.lstrip(',')}"


def free_name(name: str, template: str) -> str:
    """The name of a run as that of a function in a module, which has no other use for it. ValueError where it is no
    name."""
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"{name!r} is no name of a function")
    taken = {*re.findall(r"\w+", template), *dir(builtins), *keyword.kwlist, *keyword.softkwlist}
    while name in taken:
        name += "_"
    return name
