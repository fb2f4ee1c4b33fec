"""`dsc check [SPEC[:RUN] …] [-s key=value]`: check specs and report every mistake at once. Nothing is run.

dsc check                          the one spec of this folder
dsc check specs/*.dsc              several; a file without a run is checked as a library
dsc check spec.dsc:ablation -s parallel.pipeline=8
dsc check --format github          annotations of a pull request; --format json: docs/json.md

A data source that matches no file here is only a warning: the data may be elsewhere (`dsc train --data`).

Exit codes: 0 no mistakes (warnings do not count) · 2 mistakes were found
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import EXIT_SPEC, add_overrides, human, report_error, say
from compiler.plan.read_files import mistakes_of
from dsl.closed_forms.counts import parameters
from dsl.load import Analysis, ResolvedView, analyse, refusals
from dsl.messages.diagnostics import (
    Diagnostic,
    Edit,
    Note,
    Source,
    SpecError,
    make_visible,
    plural,
    statement_of,
    text_before_value,
)
from dsl.resolve.chosen import find, split
from dsl.resolve.files import content_of, read

JSON_VERSION = 1
OF_DATA = frozenset({"D0101", "D0102", "D0104", "D0105", "D0106"})  # data that is missing here, and may be elsewhere
MAX_ROUNDS = 10  # of --fix: a correction may uncover another mistake
MAX_TRIED = 50  # corrections per round; trying one takes about 30 ms


@dataclass(frozen=True)
class CheckedSpec:
    """The result of checking one SPEC argument."""

    spec: str  # the argument
    diagnostics: tuple[Diagnostic, ...]
    views: tuple[ResolvedView, ...] = ()  # of its runs, or of the blocks of a library

    @property
    def is_right(self) -> bool:
        return not any(item.severity == "error" for item in self.diagnostics)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(view.spec.name for view in self.views if hasattr(view.spec, "name"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    text = "spec files, or SPEC:RUN for one run of a file; default: the spec in the current folder"
    parser.add_argument("specs", nargs="*", metavar="SPEC", help=text)
    add_overrides(parser)
    text = "text, json (docs/json.md) or github (workflow annotations); default: text"
    parser.add_argument("--format", choices=("text", "json", "github"), default="text", help=text)
    text = "correct misspelt words in the given files, where only one correction is possible"
    parser.add_argument("--fix", action="store_true", help=text)
    parser.set_defaults(at_once=True, uncollected=True)  # cli.main exits right after the last line


def run(args: argparse.Namespace) -> int:
    """Check the specs and print the mistakes."""
    try:
        specs = args.specs or [str(find())]
    except SpecError as error:
        return _print(args.format, [CheckedSpec("", error.diagnostics)])
    if args.fix:
        fault = _fix(specs, args.set)
        if fault:
            return report_error(fault)
    return _print(args.format, [examine(spec, args.set) for spec in dict.fromkeys(specs)])


def examine(spec: str, overrides: Sequence[str]) -> CheckedSpec:
    """Check a spec. If it has no mistakes, the result lists what `dsc train` would refuse, as warnings."""
    file, run = split(spec)
    analysis = analyse(file, run, overrides)
    if mistakes := analysis.diagnostics or mistakes_of(analysis, file):
        return CheckedSpec(spec, mistakes, analysis.views)
    return CheckedSpec(spec, (*refusals(analysis), *_data_warnings(analysis, file)), analysis.views)


def _data_warnings(analysis: Analysis, file: str) -> tuple[Diagnostic, ...]:
    """Warnings for data sources that match no file here."""
    runs = [view for view in analysis.views if hasattr(view.spec, "train")]
    if all({*view.spec.data.patterns.values()} == {"python_stdlib"} for view in runs):
        return ()
    from compiler.tools import data_source  # imported only for specs with their own data

    folder = Path(file).parent
    warnings = (item for view in runs for item in data_source.warnings(view.spec, view.context.origins, folder))
    return tuple(dict.fromkeys(warnings))


def _print(output_format: str, results: list[CheckedSpec]) -> int:
    items = list(dict.fromkeys(item for result in results for item in result.diagnostics))  # specs may share imports
    PRINTERS[output_format](results, items)
    return 0 if all(result.is_right for result in results) else EXIT_SPEC


# ---------------------------------------------------------------- text


def _print_text(results: list[CheckedSpec], items: list[Diagnostic]) -> None:
    """Print mistakes to stderr; to stdout the valid specs, and what `dsc train` would refuse."""
    errors = [item for item in items if item.severity == "error"]
    say("\n\n".join(str(item) for item in errors))
    for result in results:
        if result.is_right:
            print(f"{make_visible(result.spec)}: right{_contents(result)}")
            remarks = [item for item in result.diagnostics if item.code in OF_DATA]
            refused = [item for item in result.diagnostics if item.code not in OF_DATA]
            if refused:
                subject = f"run {result.runs[0]} is" if len(result.runs) == 1 else "some runs are"
                print(f"\n{subject} right, but cannot be compiled and trained yet:\n")
                say("\n\n".join(str(item) for item in refused), sys.stdout)
            if remarks:
                print()
                say("\n\n".join(str(item) for item in remarks), sys.stdout)
    if errors:
        say(f"\n{_totals(results, items)}")


def _contents(result: CheckedSpec) -> str:
    """`: run pretrain, model deepseek_v3 with 671.0B parameters`."""
    models = {}
    for view in result.views:
        model = getattr(view.spec, "model", None)
        if model is not None:
            count = parameters(model)
            active = f", {human(count.active)} active" if count.active < count.total else ""
            in_mtp = f", {human(count.mtp)} more of MTP" if count.mtp else ""
            modules = ", ".join(dict.fromkeys(make_visible(part.module) for _, part in model.customs))
            excluded = f" without those of {modules}" if modules else ""  # counting them would run the module
            models[model.name] = (
                f"{make_visible(model.name)} with {human(count.total)} parameters{active}{in_mtp}{excluded}"
            )
    runs = [f"run{'s' if len(result.runs) > 1 else ''} {', '.join(result.runs)}"] if result.runs else []
    parts = [*runs, *([f"model{'s' if len(models) > 1 else ''} {', '.join(models.values())}"] if models else [])]
    return f": {'; '.join(parts)}" if parts else ""


def _totals(results: list[CheckedSpec], items: Iterable[Diagnostic]) -> str:
    """`3 errors in 2 of 5 specs`."""
    errors = sum(item.severity == "error" for item in items)
    num_wrong = sum(not result.is_right for result in results)
    return plural(errors, "error") + (f" in {num_wrong} of {plural(len(results), 'spec')}" if len(results) > 1 else "")


# ---------------------------------------------------------------- json


def _print_json(results: list[CheckedSpec], items: list[Diagnostic]) -> None:
    import json

    print(json.dumps(document(results, items), indent=2, ensure_ascii=False))


def document(results: Sequence[CheckedSpec], items: Sequence[Diagnostic]) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    from dsl.text.as_json import diagnostic_value  # imported only for this format

    return {
        "version": JSON_VERSION,
        "specs": [
            {"spec": result.spec, "right": result.is_right, "runs": list(result.runs), "models": _models(result)}
            for result in results
            if result.spec
        ],
        "diagnostics": [diagnostic_value(item) for item in items],
        "errors": sum(item.severity == "error" for item in items),
        "warnings": sum(item.severity == "warning" for item in items),
    }


def _models(result: CheckedSpec) -> list[dict[str, Any]]:
    """The models of a valid spec, each once, with their parameter counts."""
    if not result.is_right:
        return []
    models = {view.spec.model.name: view.spec.model for view in result.views if getattr(view.spec, "model", None)}
    counts = {name: parameters(model) for name, model in models.items()}
    return [
        {"name": name, "parameters": count.total, "active": count.active, "mtp": count.mtp}
        for name, count in counts.items()
    ]


# ---------------------------------------------------------------- github


def _print_github(results: list[CheckedSpec], items: list[Diagnostic]) -> None:
    """Print a workflow command per message to stdout, and the totals to stderr."""
    for item in items:
        print(annotation(item))
    say(_totals(results, items))


def annotation(item: Diagnostic) -> str:
    """A message as a workflow command: `::error file=a.dsc,line=7,…,title=E0201::…`."""
    values: dict[str, object] = {}
    if item.span is not None and item.span.source.name != "-s":
        span = item.span
        end_line, end_column = span.source.position(span.end)
        values = {"file": span.source.name, "line": span.line, "endLine": end_line}
        if end_line == span.line:  # columns are allowed for a single line only
            values |= {"col": span.column, "endColumn": end_column}
    values["title"] = item.code
    notes = [f"note: {note.message}{_places(note)}" for note in item.notes]
    hints = [f"hint: {item.hint}"] if item.hint else _resolution_lines(item)
    text = "\n".join([item.message, *hints, *notes])
    properties = ",".join(f"{key}={_property(str(value))}" for key, value in values.items())
    return f"::{item.severity} {properties}::{_data(text)}"


def _places(note: Note) -> str:
    places = [str(note.span)] if note.span else [f"`{statement_of(place)}` {place}" for place in note.places]
    return f" ({', '.join(places)})" if places else ""


def _resolution_lines(item: Diagnostic) -> list[str]:
    """The edits that would resolve a conflict, one line per resolution."""
    resolutions = item.conflict.resolutions if item.conflict else ()
    lines = [
        ", ".join(f"write `{text_before_value(edit.span)}{edit.text}` ({edit.span})" for edit in edits)
        for edits in resolutions
    ]
    return [f"{'or' if index else 'hint'}: {text}" for index, text in enumerate(lines)]


def _data(text: str) -> str:
    """Escape the text of a workflow command (https://docs.github.com/actions → workflow commands)."""
    lines = (make_visible(line) for line in text.split("\n"))
    return "%0A".join(line.replace("%", "%25").replace("\r", "%0D") for line in lines)


def _property(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace(":", "%3A").replace(",", "%2C")


PRINTERS = {"text": _print_text, "json": _print_json, "github": _print_github}


# ---------------------------------------------------------------- --fix


def _fix(specs: Sequence[str], overrides: Sequence[str]) -> str:
    """Correct misspelt words in the given files, and print each correction. Returns an error message, or ""."""
    from compiler.cli.commands.output_files import replace
    from dsl.text.edits import apply, corrects_spelling, edit_of

    files = {os.path.realpath(split(spec)[0]): split(spec)[0] for spec in specs}  # real path → the name that was given
    for _ in range(MAX_ROUNDS):
        items = _mistakes(specs, overrides, {})
        edits = [edit for item in items if corrects_spelling(item) and (edit := edit_of(item))]
        edits = _helpful(_under_one_name(edit for edit in edits if _file(edit) in files), specs, overrides, items)
        if not edits:
            break
        for name in dict.fromkeys(edit.span.source.name for edit in edits):
            in_file = [edit for edit in edits if edit.span.source.name == name]
            text = apply(in_file[0].span.source.text, in_file)
            path = Path(files[_file(in_file[0])])
            mark = "\ufeff" if content_of(str(path)).content.startswith(b"\xef\xbb\xbf") else ""
            try:
                replace(path, (mark + text).encode())
            except OSError as error:
                return f"{name} cannot be written: {error.strerror}"
            for edit in in_file:
                say(make_visible(f"fixed {edit.span}: `{edit.span.text}` → `{edit.text}`"))
    return ""


def _file(edit: Edit) -> str:
    return os.path.realpath(edit.span.source.name)


def _under_one_name(edits: Iterable[Edit]) -> list[Edit]:
    """Keep the edits under the first name of each file, where a file is read under several names."""
    names: dict[str, str] = {}
    return [edit for edit in edits if names.setdefault(_file(edit), edit.span.source.name) == edit.span.source.name]


def _helpful(
    edits: Sequence[Edit], specs: Sequence[str], overrides: Sequence[str], items: Sequence[Diagnostic]
) -> list[Edit]:
    """The corrections that leave fewer mistakes and add none. Each is tried together with those kept before it."""
    from dsl.text.edits import apply, is_mended

    helpful: list[Edit] = []
    for edit in edits[:MAX_TRIED]:
        by_source: dict[Source, list[Edit]] = {}
        for tried in (*helpful, edit):
            by_source.setdefault(tried.span.source, []).append(tried)
        texts = {source.name: apply(source.text, group) for source, group in by_source.items()}
        after = _mistakes(specs, overrides, texts)
        if is_mended(items, after):
            helpful.append(edit)
            items = after
    return helpful


def _mistakes(specs: Sequence[str], overrides: Sequence[str], texts: Mapping[str, str]) -> list[Diagnostic]:
    """The mistakes of specs. `texts`: path → the text to read instead of the file's."""

    def reader(path: str) -> tuple[Source, tuple[Diagnostic, ...]]:
        name = os.path.normpath(path)
        return (Source(name, texts[name]), ()) if name in texts else read(path)

    per_spec = (analyse(*split(spec), overrides, reader).diagnostics for spec in specs)
    return list(dict.fromkeys(item for items in per_spec for item in items))
