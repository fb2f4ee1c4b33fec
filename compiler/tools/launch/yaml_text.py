"""YAML from plain values, so that every reader of YAML 1.1 or 1.2 finds the same values in it.

A word is plain only if no version of YAML could take it for something else than text. All other texts are in double
quotes: `1e3`, `y` and a digest such as `12e45` are numbers and truths to some readers.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_WORD = re.compile(r"[A-Za-z][A-Za-z_./-]*")
_BREAKS = re.compile("[\r\x85\u2028\u2029]")  # a reader of YAML 1.1 takes these for ends of lines, and makes them \\n
_TRUTHS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Strings as above; lists are indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"'
    if "\n" in text and not _BREAKS.search(text):
        style = "|"  # the library falls back to double quotes where a block cannot hold a text
    elif _WORD.fullmatch(text) and text.lower() not in _TRUTHS:
        style = ""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def documents(*values: dict[str, Any]) -> str:
    """The text of one or several documents, keys in their order."""
    return yaml.dump_all(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20, explicit_start=len(values) > 1
    )
