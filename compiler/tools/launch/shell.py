"""Shell scripts from templates. A template can print numbers and quoted words, and nothing else: a name in a spec, a
path or an option never becomes code."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2


class Quoted(str):
    """A text that a shell reads as one word, or as several that were quoted one by one."""


def quoted(text: str) -> Quoted:
    """One word."""
    assert "\0" not in text, "no argument of a process holds a NUL"
    return Quoted(shlex.quote(text))


def script(template: str, **values: Any) -> str:
    """The text of a script. Jinja's errors are ours: every value is there, and is quoted where it is a text."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        finalize=_checked,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # it would escape for HTML; `_checked` refuses what is not quoted for a shell
    )
    found.filters["q"] = quoted
    return found


def _checked(value: object) -> object:
    assert isinstance(value, (Quoted, int)), f"{value!r} is not quoted"
    return value
