"""Imports of plans: write a spec from another system's configuration, and account for each of its keys."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path

from compiler.cli.commands.common import EXIT_DIFFERS, report_error, report_mistakes, say
from compiler.files.text import TextFileError, read_text
from compiler.schedule.spec_schedule import MAX_BYTES
from compiler.tools.importers import key_files, megatron, shell_words, torchtitan
from compiler.tools.importers.plan_ledger import CHANGES, ImportedPlan, LedgerEntry, Members
from compiler.tools.importers.python_calls import read_returned_call
from compiler.tools.importers.torchtitan import SideFiles
from compiler.tools.importers.write import identifier
from dsl.load import analyse
from dsl.messages.diagnostics import Diagnostic, Source, SpecError, make_visible, plural, render_all
from dsl.resolve.files import read
from dsl.text.formatter import format_source

VERSION = 1  # of the JSON, docs/json.md
Read = tuple[ImportedPlan, list[Diagnostic]]  # the plan, and what could not be read


@dataclass(frozen=True)
class WrittenSpec:
    """The text of a spec, and the errors in it."""

    text: str
    errors: tuple[Diagnostic, ...]

    def exit_code(self) -> int:
        """Print the errors of the written spec. Returns the exit code."""
        if not self.errors:
            return 0
        count = plural(len(self.errors), "error")
        say(f"{render_all(self.errors)}\n\n{count} in the written spec: edit it, then run `dsc check`")
        return EXIT_DIFFERS


def spec_of(args: argparse.Namespace, name: str) -> WrittenSpec | None:
    """The spec, or None after printing what is wrong."""
    try:
        variables = dict(definition.split("=", 1) for definition in args.define)
    except ValueError:
        report_error("-D takes NAME=VALUE", "write `-D TP=1`", args.format)
        return None
    try:
        source, mistakes = read(str(args.path))
        if mistakes:
            raise SpecError(mistakes)
        plan, computed = READERS[args.system](args, name, source, variables)
    except SpecError as error:
        report_mistakes(error.diagnostics, args.format)
        return None
    text = format_source(Source(args.out, plan.text)) if not plan.mistakes else ""
    changed = [entry for entry in plan.ledger if entry.kind in CHANGES]
    say(render_all((*computed, *plan.mistakes)))
    say("\n".join(make_visible(_line(entry)) for entry in plan.ledger if entry.kind not in ("said", "no effect")))
    is_refused = bool(plan.mistakes or (changed and not args.lossy))
    if args.format == "json":
        value = {"version": VERSION, "from": args.system, "spec": None if is_refused else text}
        print(json.dumps(value | {"keys": [_json(entry) for entry in plan.ledger]}))
    if is_refused:
        hint = "" if plan.mistakes else "; --lossy writes the spec, with what it cannot express as comments"
        say(f"\n{plural(len(plan.mistakes) + len(changed), 'error')}{hint}")
        return None
    return WrittenSpec(text, _errors(args.out, text))


def _megatron(args: argparse.Namespace, name: str, source: Source, variables: dict[str, str]) -> Read:
    """Read a Megatron configuration; the suffix of the file tells its kind."""
    if args.path.suffix == ".py":
        function, recipe, computed = read_returned_call(source, megatron.CONFIG, args.config)
        members, name = megatron.keys_of_recipe(recipe), args.name or identifier(function)
    elif args.path.suffix in (".yaml", ".yml"):
        members, computed = key_files.yaml_keys(source, variables)
    else:
        members, computed = shell_words.script(source, variables)
    return megatron.import_keys(members, name, args.devices, args.vocab), computed


def _torchtitan(args: argparse.Namespace, name: str, source: Source, _: dict[str, str]) -> Read:
    """Read a torchtitan configuration and the schedule beside it; the suffix of the file tells its kind."""
    members: Members
    computed: list[Diagnostic]
    if args.path.suffix == ".toml":
        members, computed = torchtitan.keys_of_job_file(key_files.toml_keys(source)), []
    else:
        function, members, computed = read_returned_call(source, torchtitan.CONFIG, args.config)
        name = args.name or identifier(function)
    return torchtitan.import_keys(members, name, args.devices, _side_files(args.path, args.out)), computed


READERS = {"megatron-bridge": _megatron, "torchtitan": _torchtitan}


def _side_files(path: Path, spec_path: str) -> SideFiles:
    """Access to files in the folder of a configuration and below, and their names relative to a spec at `spec_path`."""

    def text(name: str) -> str | None:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        try:
            return read_text(path.parent / name, MAX_BYTES).replace("\r\n", "\n")
        except TextFileError:
            return None

    folder = Path(spec_path).parent if spec_path.endswith(".dsc") else Path()
    return SideFiles(text, lambda name: Path(os.path.relpath(path.parent / name, folder)).as_posix())


def _errors(name: str, text: str) -> tuple[Diagnostic, ...]:
    """The errors of the spec. Its cluster is only a starting point, and may be too small for the model."""
    analysis = analyse(name, reader=lambda path: (Source(path, text), ()))
    return tuple(item for item in analysis.diagnostics if item.severity == "error")


def _line(entry: LedgerEntry) -> str:
    return f"{entry.place}: {entry}" if entry.place else str(entry)


def _json(entry: LedgerEntry) -> dict[str, object]:
    place = {"line": entry.place.line, "column": entry.place.column} if entry.place else {"line": None, "column": None}
    return {"kind": entry.kind, "key": entry.key, "value": entry.value, "why": entry.why, **place}
