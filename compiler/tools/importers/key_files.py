"""Reads the keys of YAML and TOML files, with their spans.

In YAML a key may begin with `--`, like a command-line argument, and is found at any depth; `$NAME` is replaced by the
caller's variables. In TOML a key is prefixed with the names of its tables.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from compiler.tools.importers.json_text import JsonValue
from dsl.messages.diagnostics import Diagnostic, Source, Span, SpecError

# --- Values: text with its variables replaced, and values that are unknown without running a program
#
# Text that looks like a number or a boolean becomes one; other text is a string. A value that is known only by
# running a program is a `ComputedValue`: the ledger lists it, and a warning points to it.

VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(:?[-=](?:\$\{[^{}]*\}|[^{}])*)?\}|(\w+))")
UNKNOWN = re.compile(r"\$[\w({@*#?!$]|`")  # variables and commands that were not replaced
MOST_CHARACTERS = 100_000  # of replacements in a text: nested variables may double it each time
WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class ComputedValue:
    """The source text of a value that is known only by running a program."""

    text: str


def replace_variables(text: str, variables: Mapping[str, str]) -> str:
    """A text with its variables replaced. A variable without value and default stays, as does one whose value would
    exceed `MOST_CHARACTERS`."""
    remaining = MOST_CHARACTERS

    def value(match: re.Match[str]) -> str:
        nonlocal remaining
        replacement, default = variables.get(match[1] or match[3]), match[2]
        if default is not None and (replacement is None or (replacement == "" and default[0] == ":")):
            replacement = replace_variables(default.lstrip(":")[1:], variables)
        if replacement is None or len(replacement) > remaining:
            return match[0]
        remaining -= len(replacement)
        return replacement

    return VARIABLE.sub(value, text)


def is_known(text: str) -> bool:
    """Whether a text has no unreplaced shell variables or commands."""
    return UNKNOWN.search(text) is None


def parse_word(text: str) -> Any:
    """A word as a number, boolean or None if it looks like one, else as a string."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text


def unknown(name: str, text: str, place: Span, source_text: str) -> Diagnostic:
    """A warning that a key's text has unknown variables. `source_text`: the text before any were replaced."""
    match = VARIABLE.search(source_text)
    hint = f"set it: -D {match[1] or match[3]}=VALUE" if match and not match[0].strip("${}").isdecimal() else ""
    message = f"`{name}` is {text[:80]}, and nothing is executed here"
    return Diagnostic("I0104", message, place, hint or "write its value", severity="warning")


# --- key files

# A key of more parts than any configuration has. The lookbehind anchors it at the start of a part: linear time.
DEEP_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){100}")
HUGE = re.compile(r"\b0[xob][0-9a-fA-F_]{4000,}")  # a number that Python parses but refuses to print
TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
ENTRY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
NULL, TRUTH = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
MAX_DEPTH = 32
MAX_ITEMS = 100_000  # values in all, counting an aliased value each time it is used


def yaml_keys(source: Source, variables: Mapping[str, str]) -> tuple[dict[str, list[JsonValue]], list[Diagnostic]]:
    """The keys with values in a YAML file, at any depth, and warnings about what could not be read.

    `variables`: values for `$NAME`. Raises SpecError if the text is not YAML.
    """
    try:
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        start = min(mark.index if mark else 0, max(0, len(source.text) - 1))
        message = f"this is not YAML: {getattr(error, 'problem', error)}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    reader = _Yaml(source, variables)
    reader.walk(root, 0)
    return reader.members, reader.mistakes


class _Yaml:
    """State of reading a YAML file: the keys and warnings so far."""

    def __init__(self, source: Source, variables: Mapping[str, str]) -> None:
        self.source, self.variables = source, variables
        self.members, self.mistakes = dict[str, list[JsonValue]](), list[Diagnostic]()
        self.visited: set[int] = set()  # ids of visited nodes: an alias refers to one again
        self.items = 0

    def walk(self, node: Any, depth: int) -> None:
        """Collect the keys of a node and of the nodes below it. Raises SpecError if they nest too deep."""
        if id(node) in self.visited or isinstance(node, yaml.ScalarNode) or node is None:
            return
        self.visited.add(id(node))
        if depth > MAX_DEPTH:
            raise self._too("deep", node)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.walk(item, depth + 1)
            return
        for key, value in node.value:
            self.walk(value, depth + 1)
            if not isinstance(value, yaml.MappingNode):
                name = str(key.value).removeprefix("--").replace("-", "_")
                end = max(key.end_mark.index, value.end_mark.index)  # the value of an alias is before its key
                self._add_value(name, Span(self.source, key.start_mark.index, end), value)

    def _add_value(self, name: str, place: Span, node: Any) -> None:
        value = self._value(node, 0)
        if open_text := _first_computed_text(value):
            self.mistakes.append(unknown(name, open_text, place, open_text))
            value = ComputedValue(open_text)
        self.members.setdefault(name, []).append(JsonValue(value, place, place))

    def _value(self, node: Any, depth: int) -> Any:
        """The value of a node. Raises SpecError if aliases make it too large."""
        self.items += 1
        if self.items > MAX_ITEMS or depth > MAX_DEPTH:
            raise self._too("large", node)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return "{…}"  # its keys have separate entries
        if node.tag == NULL:
            return None
        if node.tag == TRUTH:
            return node.value.lower() in ("true", "yes", "on")
        text = replace_variables(node.value, self.variables)
        return parse_word(text) if is_known(text) else ComputedValue(text)

    def _too(self, excess: str, node: Any) -> SpecError:
        return _too("YAML", excess, self.source, node.start_mark.index)


def _first_computed_text(value: Any) -> str:
    """The text of the first `ComputedValue` in a value; "" if there is none."""
    if isinstance(value, list):
        return next((text for item in value if (text := _first_computed_text(item))), "")
    return value.text if isinstance(value, ComputedValue) else ""


def toml_keys(source: Source) -> dict[str, JsonValue]:
    """The keys of a TOML file by their paths, such as `training.seq_len`. Raises SpecError if the text is not TOML."""
    if (deep := DEEP_KEY.search(source.text)) is not None:  # tomllib is quadratic in the parts of a key
        raise _too("TOML", "deep", source, deep.start())
    if (huge := HUGE.search(source.text)) is not None:
        raise _too("TOML", "large", source, huge.start())
    try:
        root = tomllib.loads(source.text)
    except RecursionError:
        raise _too("TOML", "deep", source, 0) from None
    except tomllib.TOMLDecodeError as error:
        line, column = map(int, position.groups()) if (position := TOML_PLACE.search(str(error))) else (1, 1)
        start = min(source.line_starts[line - 1] + column - 1, max(0, len(source.text) - 1))
        message = f"this is not TOML: {TOML_PLACE.sub('', str(error)).strip()}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    except ValueError:  # an integer with more digits than Python parses
        raise _too("TOML", "large", source, 0) from None
    places, table = dict[str, Span](), ""
    for number, begin in enumerate(source.line_starts, 1):
        line_text = source.line(number)
        if head := TABLE.fullmatch(line_text):
            table = _path(head[1])
            places.setdefault(table, Span(source, begin, begin + len(line_text)))
        elif entry := ENTRY.match(line_text):
            place = Span(source, begin + entry.start(1), begin + entry.end(1))
            places.setdefault(f"{table}.{_path(entry[1])}".lstrip("."), place)
    keys = dict[str, JsonValue]()

    def walk(values: Mapping[str, Any], path: str, near: Span) -> None:
        for name, value in values.items():
            key = f"{path}.{name}".lstrip(".")
            place = places.get(key, near)
            if _is_deep(value):
                raise _too("TOML", "deep", source, place.start)
            if isinstance(value, dict):
                walk(value, key, place)
            elif isinstance(value, (bool, int, float, str, list)) and (
                type(value) is not float or math.isfinite(value)
            ):
                keys[key] = JsonValue(value, place, place)
            else:
                keys[key] = JsonValue(str(value), place, place)

    walk(root, "", Span(source, 0, 0))
    return keys


def _is_deep(value: Any) -> bool:
    """Whether tables and lists nest deeper than MAX_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = (node for node in level if isinstance(node, dict | list))
        level = [item for outer in inner for item in (outer.values() if isinstance(outer, dict) else outer)]
        depth += 1
    return bool(level)


def _too(language: str, excess: str, source: Source, start: int) -> SpecError:
    start = min(start, max(0, len(source.text) - 1))
    message = f"this {language} is too {excess} to be a configuration"
    return SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))])


def _path(text: str) -> str:
    """A dotted key without its blanks and quotes."""
    return ".".join(part.strip().strip("\"'") for part in text.split("."))
