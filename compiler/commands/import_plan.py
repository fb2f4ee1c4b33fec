"""What imports of plans write: a spec from another system's configuration, and a ledger of its keys."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from compiler.commands.common import say, wrong
from compiler.importers import command_lines, key_files, megatron, torchtitan
from compiler.importers.plan_ledger import CHANGES, Entry
from compiler.importers.plan_text import Imported, Members
from compiler.importers.python_calls import returned
from compiler.importers.torchtitan import Beside
from compiler.importers.write import identifier
from compiler.schedules.spec_schedule import MAX_BYTES
from compiler.textfile import TextFileError, read_text
from dsl.diagnostics import Diagnostic, SpecError, plural, render_all, visible
from dsl.formatter import formatted
from dsl.load import analyse
from dsl.resolve.files import read
from dsl.source import Source

VERSION = 1  # of the JSON, docs/json.md
Read = tuple[Imported, list[Diagnostic]]  # a spec, and what could not be read


def spec_of(args: argparse.Namespace, name: str) -> str | None:
    """The text of the spec; None after what is wrong has been said."""
    try:
        variables = dict(each.split("=", 1) for each in args.define)
    except ValueError:
        wrong("-D takes NAME=VALUE", "write `-D TP=1`", args.format)
        return None
    try:
        source, mistakes = read(str(args.path))
        if mistakes:
            raise SpecError(mistakes)
        found, computed = READERS[args.system](args, name, source, variables)
    except SpecError as error:
        say(str(error))
        return None
    text = formatted(Source(args.out, found.text)) if not found.mistakes else ""
    broken = _broken(args.out, text) if text else ()
    changed = [entry for entry in found.ledger if entry.kind in CHANGES]
    say(render_all((*computed, *found.mistakes, *broken)))
    say("\n".join(visible(_line(entry)) for entry in found.ledger if entry.kind not in ("said", "no effect")))
    refused = bool(found.mistakes or broken or (changed and not args.lossy))
    if args.format == "json":
        value = {"version": VERSION, "from": args.system, "spec": None if refused else text}
        print(json.dumps(value | {"keys": [_json(entry) for entry in found.ledger]}))
    if refused:
        hint = "" if found.mistakes or broken else "; --lossy writes the spec with what it cannot express as comments"
        say(f"\n{plural(len(found.mistakes) + len(broken) + len(changed), 'error')}{hint}")
        return None
    return text


def _megatron(args: argparse.Namespace, name: str, source: Source, variables: dict[str, str]) -> Read:
    """Read a configuration of Megatron, by the kind of its file."""
    if args.path.suffix == ".py":
        function, found, computed = returned(source, megatron.CONFIG, args.config)
        members, name = megatron.from_recipe(found), args.name or identifier(function)
    elif args.path.suffix in (".yaml", ".yml"):
        members, computed = key_files.yaml_keys(source, variables)
    else:
        members, computed = command_lines.script(source, variables)
    return megatron.imported(members, name, args.devices, args.vocab), computed


def _torchtitan(args: argparse.Namespace, name: str, source: Source, _: dict[str, str]) -> Read:
    """Read a configuration of torchtitan, by the kind of its file, with the schedule beside it."""
    members: Members
    computed: list[Diagnostic]
    if args.path.suffix == ".toml":
        members, computed = torchtitan.from_toml(key_files.toml_keys(source)), []
    else:
        function, members, computed = returned(source, torchtitan.CONFIG, args.config)
        name = args.name or identifier(function)
    return torchtitan.imported(members, name, args.devices, _beside(args.path, args.out)), computed


READERS = {"megatron-bridge": _megatron, "torchtitan": _torchtitan}


def _beside(path: Path, out: str) -> Beside:
    """The files in the folder of a configuration and below, and how a spec at `out` names them."""

    def text(name: str) -> str | None:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        try:
            return read_text(path.parent / name, MAX_BYTES).replace("\r\n", "\n")
        except TextFileError:
            return None

    folder = Path(out).parent if out.endswith(".dsc") else Path()
    return Beside(text, lambda name: Path(os.path.relpath(path.parent / name, folder)).as_posix())


def _broken(name: str, text: str) -> tuple[Diagnostic, ...]:
    """What is wrong with the spec that was written."""
    analysis = analyse(name, reader=lambda path: (Source(path, text), ()))
    return tuple(item for item in analysis.diagnostics if item.severity == "error")


def _line(entry: Entry) -> str:
    return f"{entry.place}: {entry}" if entry.place else str(entry)


def _json(entry: Entry) -> dict[str, object]:
    place = {"line": entry.place.line, "column": entry.place.column} if entry.place else {"line": None, "column": None}
    return {"kind": entry.kind, "key": entry.key, "value": entry.value, "why": entry.why, **place}
