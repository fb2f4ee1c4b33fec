"""`dsc diff A [B] [-s key=value]`: what differs between two specs, and its effect on parameters, memory and schedule.

dsc diff old.dsc new.dsc
dsc diff spec.dsc:base spec.dsc:ablation
dsc diff spec.dsc -s parallel.pipeline=8   what an override changes; with B, -s applies to B

Two runs with phases are compared phase by phase. Comments, order, formatting and the names of runs, models, clusters
and precisions do not count.

Exit codes: 0 no difference · 1 the specs differ · 2 a spec or the command line is wrong
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compiler.cli.commands.common import (
    EXIT_DIFFERS,
    add_overrides,
    human,
    report_error,
    report_mistakes,
    say_other_phases,
)
from compiler.plan.read_files import with_files
from compiler.tools.difference import Fact, LayersMove, SpecDifference, ValueChange, difference
from dsl.load import ResolvedSpec, resolve
from dsl.messages.diagnostics import Diagnostic, SpecError, in_order, make_visible
from dsl.resolve.chosen import phases_in, split
from dsl.resolve.phases import SEPARATOR

_Phases = Mapping[str, str]

JSON_VERSION = 1
ABSENT = "—"
TITLES = {
    "parameters": "parameters",
    "memory": "memory of the fullest device, at least",
    "layers": "layers",
    "schedule": "schedule",
}
NAMES = {
    "schedule.micro_batches": "micro-batches",
    "schedule.batch_sizes": "batch sizes",
    "schedule.bubble": "bubble, F = I = W",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("before", metavar="A", help="a spec file, or SPEC:RUN")
    parser.add_argument("after", nargs="?", metavar="B", help="the spec to compare with; default: A with -s")
    add_overrides(parser)
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="text or json (docs/json.md); default: text"
    )


def run(args: argparse.Namespace) -> int:
    """Print the difference. Returns the exit code: 0 if there is none, else 1."""
    if args.after is None and not args.set:
        return report_error(
            "there is nothing to compare A with",
            "name another spec, or override a key: -s parallel.pipeline=8",
            args.format,
        )
    names = (args.before, args.after or args.before)
    try:
        phases = [_phases(name) for name in names]
        if min(map(len, phases)) > 1:
            return _run_phases(args, names, *phases)
        spec_difference = _difference(names, args.set, says_others=True)
    except SpecError as error:
        sources = [item.span.source for item in error.diagnostics if item.span]
        return report_mistakes(in_order(error.diagnostics, sources), args.format)
    print(
        json.dumps(document(names, spec_difference), indent=2, ensure_ascii=False)
        if args.format == "json"
        else text(spec_difference)
    )
    return 0 if spec_difference.is_none else EXIT_DIFFERS


def _phases(name: str) -> dict[str, str]:
    """Phase name ("" for the first) → the argument that selects it. One entry for a run without phases."""
    file, run = split(name)
    return {phase.partition(SEPARATOR)[2]: f"{file}:{phase}" for phase in phases_in(file, run)} or {"": name}


def _difference(names: Sequence[str], overrides: list[str], *, says_others: bool = False) -> SpecDifference:
    """The difference of two specs, the second with overrides. Raises SpecError with the mistakes of both."""
    resolved: list[ResolvedSpec] = []
    mistakes: list[Diagnostic] = []
    for name, changes in zip(names, ([], overrides), strict=True):
        try:
            spec = resolve(name, overrides=changes)
            folder = Path(split(name)[0]).parent
            resolved.append(replace(spec, spec=with_files(spec.spec, spec.origins, folder, spec.opened)))
        except SpecError as error:
            mistakes += error.diagnostics
    if mistakes:
        raise SpecError(mistakes)
    for name, resolved_spec in zip(names, resolved, strict=True):
        if says_others:
            say_other_phases(name, resolved_spec.spec)
    return difference(*resolved)


def _run_phases(args: argparse.Namespace, names: tuple[str, str], before: _Phases, after: _Phases) -> int:
    """Print the differences of phases with the same name, and the phases that only one run has."""
    differences = {phase: _difference((before[phase], after[phase]), args.set) for phase in before if phase in after}
    lone = {"only_before": [phase for phase in before if phase not in after]}
    lone["only_after"] = [phase for phase in after if phase not in before]
    equal = not any(lone.values()) and all(spec_difference.is_none for spec_difference in differences.values())
    if args.format == "json":
        phases = [
            document((before[phase], after[phase]), spec_difference) for phase, spec_difference in differences.items()
        ]
        head = {"version": JSON_VERSION, "before": names[0], "after": names[1], "equal": equal}
        print(json.dumps({**head, "phases": phases, **lone}, indent=2, ensure_ascii=False))
    elif equal:
        print("no difference")
    else:
        parts = [
            f"{_title(phase)}\n\n{text(spec_difference)}"
            for phase, spec_difference in differences.items()
            if not spec_difference.is_none
        ]
        parts += [f"{_title(phase)}: only in {names[0]}" for phase in lone["only_before"]]
        print("\n\n".join(parts + [f"{_title(phase)}: only in {names[1]}" for phase in lone["only_after"]]))
    return 0 if equal else EXIT_DIFFERS


def _title(phase: str) -> str:
    return f"phase {phase}" if phase else "first phase"


# ---------------------------------------------------------------- text


def text(spec_difference: SpecDifference) -> str:
    """The difference as text: changed keys by block, then their effects."""
    if spec_difference.is_none:
        return "no difference"
    blocks = dict.fromkeys(change.path.partition(".")[0] for change in spec_difference.values)
    rows = {block: [_row(c) for c in spec_difference.values if c.path.partition(".")[0] == block] for block in blocks}
    for prefix, title in TITLES.items():
        facts = [_fact(fact) for fact in spec_difference.facts if fact.name.partition(".")[0] == prefix]
        facts = [row for row in facts if row not in rows.get(prefix, ())]
        rows |= {title: [*rows.get(title, ()), *facts]} if facts else {}
    rows |= {"stages": [_move(move) for move in spec_difference.moves]} if spec_difference.moves else {}
    width = max(len(name) for part in rows.values() for name, _ in part)
    return "\n\n".join(
        "\n".join((title, *(f"  {name:<{width}}  {change}" for name, change in part))) for title, part in rows.items()
    )


def _row(change: ValueChange) -> tuple[str, str]:
    _, _, key = change.path.partition(".")
    note = "  (derived)" if change.derived else ""
    return key or change.path, make_visible(f"{change.before or ABSENT} → {change.after or ABSENT}{note}")


def _fact(fact: Fact) -> tuple[str, str]:
    name = NAMES.get(fact.name, fact.name.partition(".")[2])
    return name, f"{_number(fact.before, fact.unit)} → {_number(fact.after, fact.unit)}"


def _number(value: int | float | str | None, unit: str) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if unit == "byte":
        return f"{value / 1e9:.3f}GB" if value >= 1e7 else f"{value / 1e6:.3f}MB"
    if unit == "share":
        return f"{value:.1%}"
    return human(value) if value >= 100_000 else f"{value:,}"


def _move(move: LayersMove) -> tuple[str, str]:
    layers = f"layer {move.first}" if move.first == move.last else f"layers {move.first}..{move.last}"
    return layers, f"stage {move.before} → stage {move.after}"


# ---------------------------------------------------------------- json


def document(names: Iterable[str], spec_difference: SpecDifference) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    before, after = names
    return {
        "version": JSON_VERSION,
        "before": before,
        "after": after,
        "equal": spec_difference.is_none,
        "values": [
            {"path": c.path, "before": c.before, "after": c.after, "derived": c.derived} for c in spec_difference.values
        ],
        "facts": [
            {"name": f.name, "before": f.before, "after": f.after, "unit": f.unit or None}
            for f in spec_difference.facts
        ],
        "moves": [
            {"first_layer": m.first, "last_layer": m.last, "before": m.before, "after": m.after}
            for m in spec_difference.moves
        ],
    }
