"""Keys of YAML and TOML files, with their places.

In YAML a key may begin with `--`, as an argument of a command line, and is found at any depth; `$NAME` is replaced by
given variables. In TOML a key has the names of its tables before it.
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

# --- Texts of a configuration as values, their variables replaced; and values that are not known here
#
# A text is the number, the truth value or the text that it looks like. One that a program would have to be run for is
# `ComputedValue`: the ledger names it, and a warning its place.

VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(:?[-=](?:\$\{[^{}]*\}|[^{}])*)?\}|(\w+))")
UNKNOWN = re.compile(r"\$[\w({@*#?!$]|`")  # what stays of variables and commands
MOST_CHARACTERS = 100_000  # that replace variables of a text: they may double each other
WORDS = {"true": True, "false": False, "none": None, "null": None}


@dataclass(frozen=True)
class ComputedValue:
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


# --- key files

# A key of more parts than any configuration has. It is looked for where a part begins, so in linear time.
DEEP_KEY = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){100}")
HUGE = re.compile(r"\b0[xob][0-9a-fA-F_]{4000,}")  # a number that Python reads and does not write
TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
ENTRY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
NULL, TRUTH = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
MAX_DEPTH = 32
MAX_ITEMS = 100_000  # of lists, each as often as it is named


def yaml_keys(source: Source, given: Mapping[str, str]) -> tuple[dict[str, list[JsonValue]], list[Diagnostic]]:
    """The keys of a YAML file that have values, at any depth, and what could not be read. SpecError for no YAML."""
    try:
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        start = min(mark.index if mark else 0, max(0, len(source.text) - 1))
        message = f"this is no YAML: {getattr(error, 'problem', error)}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    reader = _Yaml(source, given)
    reader.walk(root, 0)
    return reader.found, reader.mistakes


class _Yaml:
    """What was found of a YAML file so far."""

    def __init__(self, source: Source, given: Mapping[str, str]) -> None:
        self.source, self.given = source, given
        self.found, self.mistakes = dict[str, list[JsonValue]](), list[Diagnostic]()
        self.seen: set[int] = set()  # mappings: an alias names one again
        self.items = 0

    def walk(self, node: Any, depth: int) -> None:
        """Find the keys of a node and below. SpecError where it is too deep."""
        if id(node) in self.seen or isinstance(node, yaml.ScalarNode) or node is None:
            return
        self.seen.add(id(node))
        if depth > MAX_DEPTH:
            raise self._too("deep", node)
        if isinstance(node, yaml.SequenceNode):
            for each in node.value:
                self.walk(each, depth + 1)
            return
        for key, value in node.value:
            self.walk(value, depth + 1)
            if not isinstance(value, yaml.MappingNode):
                name = str(key.value).removeprefix("--").replace("-", "_")
                end = max(key.end_mark.index, value.end_mark.index)  # the value of an alias is before its key
                self._put(name, Span(self.source, key.start_mark.index, end), value)

    def _put(self, name: str, place: Span, node: Any) -> None:
        value = self._value(node, 0)
        if open_text := _computed(value):
            self.mistakes.append(unknown(name, open_text, place, open_text))
            value = ComputedValue(open_text)
        self.found.setdefault(name, []).append(JsonValue(value, place, place))

    def _value(self, node: Any, depth: int) -> Any:
        """The value of a node. SpecError where aliases make it too large."""
        self.items += 1
        if self.items > MAX_ITEMS or depth > MAX_DEPTH:
            raise self._too("large", node)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(each, depth + 1) for each in node.value]
        if isinstance(node, yaml.MappingNode):
            return "{…}"  # its keys have entries of their own
        if node.tag == NULL:
            return None
        if node.tag == TRUTH:
            return node.value.lower() in ("true", "yes", "on")
        text = replaced(node.value, self.given)
        return typed(text) if is_known(text) else ComputedValue(text)

    def _too(self, what: str, node: Any) -> SpecError:
        return _too("YAML", what, self.source, node.start_mark.index)


def _computed(value: Any) -> str:
    """The first text in a value that is not known; "" where there is none."""
    if isinstance(value, list):
        return next((text for each in value if (text := _computed(each))), "")
    return value.text if isinstance(value, ComputedValue) else ""


def toml_keys(source: Source) -> dict[str, JsonValue]:
    """The keys of a TOML file by their paths, `training.seq_len`. SpecError where the text is no TOML."""
    if (deep := DEEP_KEY.search(source.text)) is not None:  # tomllib takes the square of its parts
        raise _too("TOML", "deep", source, deep.start())
    if (huge := HUGE.search(source.text)) is not None:
        raise _too("TOML", "large", source, huge.start())
    try:
        root = tomllib.loads(source.text)
    except RecursionError:
        raise _too("TOML", "deep", source, 0) from None
    except tomllib.TOMLDecodeError as error:
        line, column = map(int, found.groups()) if (found := TOML_PLACE.search(str(error))) else (1, 1)
        start = min(source.line_starts[line - 1] + column - 1, max(0, len(source.text) - 1))
        message = f"this is no TOML: {TOML_PLACE.sub('', str(error)).strip()}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    except ValueError:  # of a whole number with more digits than Python reads
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
            at = f"{path}.{name}".lstrip(".")
            place = places.get(at, near)
            if _is_deep(value):
                raise _too("TOML", "deep", source, place.start)
            if isinstance(value, dict):
                walk(value, at, place)
            elif isinstance(value, (bool, int, float, str, list)) and (
                type(value) is not float or math.isfinite(value)
            ):
                keys[at] = JsonValue(value, place, place)
            else:
                keys[at] = JsonValue(str(value), place, place)

    walk(root, "", Span(source, 0, 0))
    return keys


def _is_deep(value: Any) -> bool:
    """Whether tables and lists of a value are in each other to more than MAX_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = (each for each in level if isinstance(each, dict | list))
        level = [each for one in inner for each in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return bool(level)


def _too(language: str, what: str, source: Source, start: int) -> SpecError:
    start = min(start, max(0, len(source.text) - 1))
    message = f"this {language} is too {what} to be a configuration"
    return SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))])


def _path(text: str) -> str:
    """A dotted key without blanks and quotes."""
    return ".".join(part.strip().strip("\"'") for part in text.split("."))
