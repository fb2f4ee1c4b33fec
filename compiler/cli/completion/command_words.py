"""What can be written on the command line, as data: commands, options, and what stands for them."""

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
SPECS = frozenset({"spec", "specs", "before", "after", "paths"})  # arguments that are .dsc files
TOPICS = frozenset({"topic", "keys"})  # arguments that are keys; of explain, codes too


@dataclass(frozen=True)
class Argument:
    """An option with its flags, or without flags what stands for itself; `kind` of what is written for it."""

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
    """All of it."""

    commands: tuple[Command, ...]
    keys: Mapping[str, tuple[str, ...]]  # what -s can set → its choices, if it has some
    codes: tuple[str, ...]


def command_line(parsers: Mapping[str, argparse.ArgumentParser]) -> CommandLine:
    """From the parser of each command."""
    commands = tuple(_command(name, parser) for name, parser in parsers.items())
    return CommandLine(commands, dict(_keys(Spec, "")), tuple(CODES))


def _command(name: str, parser: argparse.ArgumentParser) -> Command:
    arguments = [_argument(action) for action in parser._actions if action.help != argparse.SUPPRESS]
    return Command(
        name,
        parser.description or "",
        tuple(each for each in arguments if each.flags),
        tuple(each for each in arguments if not each.flags),
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
    return Argument(tuple(action.option_strings), _short(action.help or ""), kind, words, takes_value)


def _short(text: str) -> str:
    """The first clause of a help text, without what a shell would read."""
    clause = text.partition(";")[0].partition(": ")[0]
    return "".join(c for c in clause if c not in "'\"[]\\`$:").strip()


def _keys(cls: type[Node], path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The keys that -s can set: all but those of layers, which have no path of their own, and of entries with names."""
    for name, kind in fields_of(cls).items():
        here = f"{path}.{name}" if path else name
        if kind.form == "label" or (cls is Model and name == "layers") or kind.form in ("rate", "entries"):
            continue
        if here == "cluster.more":  # few clusters have it, and only there its keys can be set
            continue
        blocks = [node for node in kind.nodes if node not in (Tile, TrainTokenizer)]
        if not blocks or kind.form == "batch":
            yield here, _choices(kind.types)
            if name == "tokens":
                yield here.removesuffix("tokens") + "steps", ()
            continue
        if here in ("model", "cluster", "precision"):
            yield here, tuple(BUILT_IN) if here == "precision" else ()
        found = dict(pair for node in blocks for pair in _keys(node, here))
        yield from found.items()


def _choices(types: tuple[object, ...]) -> tuple[str, ...]:
    if types == (bool,):
        return ("true", "false")
    return tuple(str(word) for each in types if get_origin(each) is Literal for word in get_args(each))
