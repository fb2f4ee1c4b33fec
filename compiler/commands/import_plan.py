"""What `dsc import megatron-bridge` writes: a spec from another system's configuration, and a ledger of its keys."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compiler.commands.common import say, wrong
from compiler.importers import command_lines, megatron
from compiler.importers.literal_python import assignments
from compiler.importers.plan_ledger import CHANGES, Entry
from dsl.diagnostics import Diagnostic, SpecError, plural, render_all, visible
from dsl.formatter import formatted
from dsl.load import analyse
from dsl.resolve.files import read
from dsl.source import Source

VERSION = 1  # of the JSON, docs/json.md


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
        members, computed = _members(args.path, source, variables)
    except SpecError as error:
        say(str(error))
        return None
    found = megatron.imported(members, name, args.devices, args.vocab)
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


def _members(path: Path, source: Source, variables: dict[str, str]) -> tuple[megatron.Members, list[Diagnostic]]:
    """The keys of a file, by its kind."""
    if path.suffix == ".py":
        found, computed = assignments(source)
        return megatron.from_recipe(found), computed
    if path.suffix in (".yaml", ".yml"):
        return command_lines.yaml_keys(source, variables)
    return command_lines.script(source, variables)


def _broken(name: str, text: str) -> tuple[Diagnostic, ...]:
    """What is wrong with the spec that was written."""
    analysis = analyse(name, reader=lambda path: (Source(path, text), ()))
    return tuple(item for item in analysis.diagnostics if item.severity == "error")


def _line(entry: Entry) -> str:
    return f"{entry.place}: {entry}" if entry.place else str(entry)


def _json(entry: Entry) -> dict[str, object]:
    place = {"line": entry.place.line, "column": entry.place.column} if entry.place else {"line": None, "column": None}
    return {"kind": entry.kind, "key": entry.key, "value": entry.value, "why": entry.why, **place}
