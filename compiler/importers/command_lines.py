"""Arguments of a command line in a shell script or a YAML file, and keys of TOML, read without running anything.

In a script an argument is a word `--name`, with the words behind it up to the next one; `NAME=value` at the beginning
of a line is a variable. In YAML it is a key whose name may begin with `--`, at any depth. `$NAME` and
`${NAME:-default}` are replaced by variables, of the script or given ones; what stays is not known.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from compiler.importers.json_text import Json
from dsl.diagnostics import Diagnostic, SpecError
from dsl.source import Source, Span

VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
SETTING = re.compile(r"\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(?!\()(.*)")
TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
ENTRY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
WORDS = {"true": True, "false": False, "none": None, "null": None}
MAX_DEPTH = 32  # of YAML


def script(source: Source, given: Mapping[str, str]) -> tuple[dict[str, list[Json]], list[Diagnostic]]:
    """The arguments of a shell script by name, with `-` as `_`, and what could not be read."""
    variables, found, mistakes = dict(given), dict[str, list[Json]](), list[Diagnostic]()
    name: tuple[str, Span] | None = None
    values: list[tuple[str, Span]] = []

    def end() -> None:
        if name is not None:
            joined = " ".join(word for word, _ in values)
            last = values[-1][1] if values else name[1]
            _put(found, mistakes, name, Json(joined if values else True, name[1].to(last)), variables)

    for number in range(1, len(source.line_starts) + 1):
        line = source.line(number)
        if (setting := SETTING.fullmatch(line)) and "--" not in line:
            words = [*_words(source, number, setting[2])]
            if setting[1] not in given and words:
                variables[setting[1]] = _replaced(words[0][0], variables)
            continue
        for word, span in _words(source, number, line):
            if word.startswith("--"):
                end()
                key, equals, value = word[2:].partition("=")
                name, values = (key.rstrip(":").replace("-", "_"), span), [(value, span)] if equals else []
            elif word in (")", "(", "|", "&&", ";") or word.endswith("=("):
                end()
                name, values = None, []
            elif name is not None and word != "\\":
                values.append((word, span))
    end()
    return found, mistakes


def _words(source: Source, number: int, line: str) -> Iterator[tuple[str, Span]]:
    """The words of a line, without comments, and where they are."""
    reader = shlex.shlex(line, posix=True)
    reader.whitespace_split, reader.commenters = True, "#"
    begin, at = source.line_starts[number - 1], 0
    try:
        words = list(reader)
    except ValueError:  # a quote that is closed on another line
        words = line.split()
    for word in words:
        place = line.find(word, at)
        place = at if place < 0 else place
        at = min(len(line), place + len(word))
        yield word, Span(source, begin + place, begin + max(at, place + 1))


def yaml_keys(source: Source, given: Mapping[str, str]) -> tuple[dict[str, list[Json]], list[Diagnostic]]:
    """The keys of a YAML file that have values, at any depth, and what could not be read. SpecError for no YAML."""
    try:
        root = yaml.compose(source.text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        start = min(mark.index if mark else 0, max(0, len(source.text) - 1))
        message = f"this is no YAML: {getattr(error, 'problem', error)}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    found, mistakes = dict[str, list[Json]](), list[Diagnostic]()

    def walk(node: Any, depth: int) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) and depth < MAX_DEPTH else ():
            if isinstance(value, yaml.MappingNode):
                walk(value, depth + 1)
                continue
            name = str(key.value).removeprefix("--").replace("-", "_")
            place = Span(source, key.start_mark.index, max(value.end_mark.index, key.end_mark.index))
            written = [each.value for each in value.value] if isinstance(value, yaml.SequenceNode) else value.value
            _put(found, mistakes, (name, place), Json(written, place), dict(given))

    walk(root, 0)
    return found, mistakes


def toml_keys(source: Source) -> dict[str, Json]:
    """The keys of a TOML file by their paths, `training.seq_len`. SpecError where the text is no TOML."""
    try:
        root = tomllib.loads(source.text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line, column = map(int, found.groups()) if (found := TOML_PLACE.search(str(error))) else (1, 1)
        start = min(source.line_starts[line - 1] + column - 1, max(0, len(source.text) - 1))
        message = f"this is no TOML: {TOML_PLACE.sub('', str(error)).strip()}"
        raise SpecError([Diagnostic("I0103", message, Span(source, start, start + 1))]) from None
    places, table = dict[str, Span](), ""
    for number, begin in enumerate(source.line_starts, 1):
        line_text = source.line(number)
        if head := TABLE.fullmatch(line_text):
            table = _path(head[1])
            places.setdefault(table, Span(source, begin, begin + len(line_text)))
        elif entry := ENTRY.match(line_text):
            place = Span(source, begin + entry.start(1), begin + entry.end(1))
            places.setdefault(f"{table}.{_path(entry[1])}".lstrip("."), place)
    keys = dict[str, Json]()

    def walk(values: Mapping[str, Any], path: str, near: Span) -> None:
        for name, value in values.items():
            at = f"{path}.{name}".lstrip(".")
            place = places.get(at, near)
            if isinstance(value, dict) and at.count(".") < MAX_DEPTH:
                walk(value, at, place)
            elif isinstance(value, (bool, int, float, str, list)) and (
                type(value) is not float or math.isfinite(value)
            ):
                keys[at] = Json(value, place, place)
            else:
                keys[at] = Json(str(value), place, place)

    walk(root, "", Span(source, 0, 0))
    return keys


def _path(text: str) -> str:
    """A dotted key without blanks and quotes."""
    return ".".join(part.strip().strip("\"'") for part in text.split("."))


def _put(
    found: dict[str, list[Json]],
    mistakes: list[Diagnostic],
    name: tuple[str, Span],
    value: Json,
    variables: Mapping[str, str],
) -> None:
    text = _replaced(value.value, variables) if isinstance(value.value, str) else value.value
    if isinstance(text, str) and (unknown := VARIABLE.search(text)):
        message = f"`{name[0]}` is {text}, and nothing is executed here"
        variable = unknown[1] or unknown[3]
        mistakes.append(Diagnostic("I0104", message, name[1], f"give it: -D {variable}=VALUE", severity="warning"))
        return
    found.setdefault(name[0], []).append(Json(_typed(text), value.span, name[1]))


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    def of(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return VARIABLE.sub(of, text)


def _typed(text: Any) -> Any:
    """A word as the number, the truth value or the text that it is."""
    if not isinstance(text, str):
        return text
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) else text
    return text
