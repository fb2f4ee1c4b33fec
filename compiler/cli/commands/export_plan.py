"""`dsc export torchtitan|megatron-bridge|chakra`: write a plan in the format of another system."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from compiler.cli.commands.common import EXIT_SPEC, load_spec, progress, reason, report_error, say
from compiler.cli.commands.output_files import new_folder
from compiler.cli.commands.schedule_spec import ScheduledRun, run_of
from compiler.ir.stage_placement import BIDIRECTIONAL
from compiler.tools.exporters import megatron_bridge, torchtitan
from compiler.tools.exporters.planned import ExportedFiles, ExportError, LostValue, PlannedSpec, comments
from dsl.facts.layout import stages_of_layout
from dsl.facts.schedules import PLAIN
from dsl.messages.diagnostics import make_visible, plural
from dsl.schema import Spec
from runtime.contract.actions import is_copy
from runtime.system.outcome import refusal_code

VERSION = 1  # of the JSON, docs/json.md
MOST_NAMES = 4  # file names in the last line
EXPORTERS: dict[str, Callable[[PlannedSpec], ExportedFiles]] = {
    "torchtitan": torchtitan.export,
    "megatron-bridge": megatron_bridge.export,
}


def run(args: argparse.Namespace) -> int:
    """Write the folder, or print why it cannot be written. Returns the exit code."""
    chosen = load_spec(args.source, args.set, args.format)
    if chosen is None:
        return EXIT_SPEC
    try:
        exported = _export(args.system, chosen.spec)
    except ExportError as error:
        return report_error(str(error), error.hint, args.format)
    changed = [loss for loss in exported.losses if loss.changes]
    say("\n".join(map(make_visible, comments(exported.losses))))
    if changed and not args.lossy:
        if args.format == "json":
            print(_as_json(args, (), exported.losses))
        say(
            f"error: {args.system} would compute something else: {plural(len(changed), 'value')} of the spec "
            "changed\n = hint: change the spec, or write it anyway with --lossy"
        )
        return EXIT_SPEC
    try:
        with new_folder(args.out) as (new, publish):
            tell = progress("export")
            for number, (name, content) in enumerate(exported.files.items()):
                tell(f"files {number / len(exported.files):.0%}")
                (new / name).write_bytes(content)
            tell("")
            publish()
    except FileExistsError as error:
        return report_error(str(error), "name a new folder", args.format)
    except (OSError, ValueError) as error:
        cause = reason(error) if isinstance(error, OSError) else "the path is not valid"
        report_error(f"{args.out} cannot be written: {cause}", "", args.format)
        return refusal_code(error) if isinstance(error, OSError) else EXIT_SPEC
    if args.format == "json":
        print(_as_json(args, sorted(exported.files), exported.losses))
    names = list(exported.files)
    listed = ", ".join(names) if len(names) <= MOST_NAMES else f"{names[0]} to {names[-1]}"
    say(make_visible(f"wrote {args.out}: {listed}"))
    return 0


def _export(system: str, spec: Spec) -> ExportedFiles:
    """The files for a system. Raises ExportError if the spec cannot be exported to it."""
    if system == "chakra":
        from compiler.predict.predict import time_plan
        from compiler.tools.exporters import chakra

        chakra.needs_protobuf()  # check before computing times
        return chakra.export(time_plan(spec))
    return EXPORTERS[system](_plan_to_export(run_of(spec)))


def _plan_to_export(run: ScheduledRun) -> PlannedSpec:
    """The plan of a run. A schedule with two copies of a stage, or with copies to the host, is replaced by 1F1B on the
    same stages, as the other systems do not support these."""
    spec, mtp = run.spec, run.spec.model.mtp
    stages = stages_of_layout(run.layout, spec.model.num_layers, mtp.depth if mtp else 0)
    schedule, replaced = run.schedule(progress("schedule")), ""
    if schedule.stage_placement == BIDIRECTIONAL or any(is_copy(step) for steps in schedule.actions for step in steps):
        from compiler.schedule import SCHEDULES

        replaced = run.name or "a file"
        plain = SCHEDULES[PLAIN] if len(stages) == run.num_ranks else None
        if plain is None:
            raise ExportError(f"{replaced} has copies to the host, which cannot be exported", "choose another schedule")
        schedule = plain.generate(run.num_ranks, run.num_micro_batches)
    return PlannedSpec(spec, schedule, stages, run.layout, replaced)


def _as_json(args: argparse.Namespace, files: Sequence[str], losses: Sequence[LostValue]) -> str:
    value = {"version": VERSION, "to": args.system, "folder": str(args.out) if files else None, "files": list(files)}
    return json.dumps(value | {"losses": [asdict(loss) for loss in losses]})
