"""The command line as data for completion: commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from dsl.rules.codes import CODES
from dsl.schema import BUILT_IN, Model, Node, Spec, Tile, TrainTokenizer
from dsl.schema.base import fields_of

Kind = Literal["", "words", "specs", "files", "overrides", "topics"]
SPECS = frozenset({"spec", "specs", "before", "after", "paths"})  # destinations of arguments that are .dsc files
TOPICS = frozenset({"topic", "keys"})  # destinations of arguments that are keys; for explain also codes


@dataclass(frozen=True)
class Argument:
    """An option, or a positional argument (without flags). `kind`: what its value is; `words`: its choices."""

    flags: tuple[str, ...]
    help: str
    kind: Kind
    words: tuple[str, ...] = ()
    takes_value: bool = True


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]


@dataclass(frozen=True)
class CommandLine:
    """All commands, keys and codes."""

    commands: tuple[Command, ...]
    keys: Mapping[str, tuple[str, ...]]  # keys that -s can set → their choices, if any
    codes: tuple[str, ...]


def command_line(parsers: Mapping[str, argparse.ArgumentParser]) -> CommandLine:
    """Build the data from the parser of each command."""
    commands = tuple(_command(name, parser) for name, parser in parsers.items())
    return CommandLine(commands, dict(_keys(Spec, "")), tuple(CODES))


def _command(name: str, parser: argparse.ArgumentParser) -> Command:
    arguments = [_argument(action) for action in parser._actions if action.help != argparse.SUPPRESS]
    return Command(
        name,
        parser.description or "",
        tuple(argument for argument in arguments if argument.flags),
        tuple(argument for argument in arguments if not argument.flags),
    )


def _argument(action: argparse.Action) -> Argument:
    words = tuple(str(choice) for choice in action.choices or ())
    kind: Kind = "words" if words else ""
    if action.dest == "set":
        kind = "overrides"
    elif action.dest in TOPICS:
        kind = "topics"
    elif action.dest in SPECS:
        kind = "specs"
    elif action.type is Path or action.dest in ("file", "path", "out"):
        kind = "files"
    takes_value = action.nargs != 0
    return Argument(tuple(action.option_strings), _first_clause(action.help or ""), kind, words, takes_value)


def _first_clause(text: str) -> str:
    """The first clause of a help text, without characters that are special in shells."""
    clause = text.partition(";")[0].partition(": ")[0]
    return "".join(c for c in clause if c not in "'\"[]\\`$:").strip()


def _keys(cls: type[Node], path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The keys that -s can set and their choices: all except keys of layers, which have no fixed path, and named
    entries."""
    for name, kind in fields_of(cls).items():
        key = f"{path}.{name}" if path else name
        if kind.form == "label" or (cls is Model and name == "layers") or kind.form in ("rate", "entries"):
            continue
        if key == "cluster.more":  # only few clusters have it, and its keys cannot be set elsewhere
            continue
        blocks = [node for node in kind.nodes if node not in (Tile, TrainTokenizer)]
        if not blocks or kind.form == "batch":
            yield key, _choices(kind.types)
            if name == "tokens":
                yield key.removesuffix("tokens") + "steps", ()
            continue
        if key in ("model", "cluster", "precision"):
            yield key, tuple(BUILT_IN) if key == "precision" else ()
        nested = dict(pair for node in blocks for pair in _keys(node, key))
        yield from nested.items()


def _choices(types: tuple[object, ...]) -> tuple[str, ...]:
    if types == (bool,):
        return ("true", "false")
    return tuple(
        str(word) for annotation in types if get_origin(annotation) is Literal for word in get_args(annotation)
    )
