"""`dsc inspect RUN`: compare the time of every action of a run with its plan;
`dsc inspect BUILD --kernels`: list the kernels of a build, and the ops that were fused.

dsc inspect runs/quickstart                                 on the terminal
dsc inspect runs/quickstart --format html -o timeline.html  a page to zoom and hover
dsc inspect runs/quickstart --costs plan                    compare with the times predicted before the run
dsc inspect runs/quickstart --write-costs here.json         then: dsc schedule … --costs here.json
dsc inspect runs/long --phase 2                             phase 2, if later phases were trained too
dsc inspect build/quickstart --kernels                      its kernels, and the bytes that fusing saves

Exit codes: 0 done · 1 a rank ran its actions in another order than planned · 2 the folder has no traced run (with
--kernels: is no build)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.cli.commands.common import EXIT_DIFFERS, EXIT_SPEC, is_missing, reason, report_error, report_mistakes
from compiler.cli.commands.output_files import is_file, status, write, write_or_print
from compiler.files.text import read_text
from compiler.schedule.costs import MOST_BYTES, Costs, costs_of_json, shipped_cost_names, shipped_costs
from compiler.schedule.schedule import Schedule
from compiler.tools.picture.formats import FORMATS, render, screen_of
from compiler.tools.picture.panel import picture_of_measurement
from compiler.tools.picture.recorded import (
    Line,
    OrderError,
    RecordedTimes,
    TraceError,
    fit_costs,
    json_of_costs,
    measure,
    num_micro_batches,
    programs_of,
    read_trace,
    steps_of_current_programs,
)
from dsl.messages.diagnostics import SpecError
from runtime.build.run_copy import folder_of_phase

if TYPE_CHECKING:
    from compiler.cli.commands.schedule_spec import ScheduledRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("--kernels", action="store_true", help="RUN is a build: list its kernels and fused ops")
    parser.add_argument(
        "--program",
        metavar="NAME",
        help="program to show, such as train_8; default: the one with the most micro-batches",
    )
    parser.add_argument(
        "--phase", metavar="N", type=int, help="phase of a run with phases, counted from 1; default: the last trained"
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="times of actions, in ms, for the plan that the picture shows: a file, or `plan` for the predicted times; "
        "default: the measured times",
    )
    parser.add_argument("--format", choices=(*FORMATS, "json"), default="terminal", help="default: terminal")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file")
    parser.add_argument("--write-costs", metavar="FILE", type=Path, help="write the measured costs, for dsc schedule")


def run(args: argparse.Namespace) -> int:
    """Draw the picture, or list the kernels. Returns the exit code."""
    if args.kernels:
        return _list_kernels(args)
    if args.format == "json":
        return report_error("--format json needs --kernels; the trace of a run is JSON already, in its folder trace/")
    if is_missing(args.run_folder):
        return EXIT_SPEC
    if _is_build(args.run_folder):
        return report_error(
            f"{args.run_folder} is a build, which has no trace: name a run folder, as written by dsc train",
            f"`dsc inspect {args.run_folder} --kernels` lists the kernels of a build",
        )
    description_folder = folder_of_phase(args.run_folder, args.phase)
    if args.phase is not None and description_folder == args.run_folder:
        return report_error(
            f"{args.run_folder} has not trained phase {args.phase}", "its metrics.jsonl lists the phases under `phase`"
        )
    try:
        scheduled_run = _load_scheduled_run(description_folder)
        trace, num_other_steps = steps_of_current_programs(
            description_folder, read_trace(args.run_folder, scheduled_run.plan.mesh.world)
        )
        schedule, measured_times = _align_with_schedule(trace, scheduled_run, args.program)
        measured_costs = fit_costs(schedule, measured_times)
        if args.costs:
            costs, source = _costs(args.costs, scheduled_run)
        else:
            costs, source = measured_costs, "the costs measured in this run"
        title = f"{args.run_folder.name}: {schedule.name}"
        picture = picture_of_measurement(title, schedule, costs, measured_times, source, num_other_steps)
        contents = render(picture, args.format)
    except OrderError as error:
        report_error(f"{args.run_folder}: {error}")
        return EXIT_DIFFERS
    except SpecError as error:
        report_mistakes(error.diagnostics)
        return report_error(f"{args.run_folder} cannot be inspected: its spec.resolved is damaged or missing")
    except (OSError, ValueError) as error:
        return report_error(f"{args.run_folder} cannot be inspected: {reason(error)}")
    try:
        if args.write_costs:
            write(args.write_costs, json_of_costs(measured_costs).encode())
        write_or_print(contents, args.out)
    except OSError as error:
        return _report_write_error(args.out, error)
    return 0


def _report_write_error(path: Path | None, error: OSError) -> int:
    """Print which file cannot be written. Errors of stdout are raised."""
    if path is None and error.filename is None:
        raise error
    return report_error(f"{error.filename or path} cannot be written: {error.strerror}")


def _is_build(folder: Path) -> bool:
    """Whether a folder is a build of dsc compile, not a run."""
    return is_file(folder / "manifest.json") and status(folder / "trace") is None


def _list_kernels(args: argparse.Namespace) -> int:
    """Print or write the kernels of a build. Returns the exit code."""
    from compiler.cli.commands.inspect_kernels import FILE, read, runs_on_cpus, text, to_json
    from runtime.build.files import BuildError

    if args.format not in ("terminal", "json"):
        return report_error(f"--kernels has no --format {args.format}: use terminal or json")
    if args.program or args.costs or args.write_costs:
        return report_error("--kernels is for builds; --program, --costs and --write-costs are for runs")
    try:
        kernels = read(args.run_folder)
    except BuildError as error:
        return report_error(str(error))
    except ValueError:
        return report_error(
            f"{args.run_folder} has no readable {FILE}: name a folder written by this version of dsc compile"
        )
    try:
        if args.format == "json":
            write_or_print(to_json(kernels), args.out)
        else:
            screen = screen_of(sys.stdout) if args.out is None and sys.stdout.isatty() else None
            write_or_print(
                text(args.run_folder.resolve().name, kernels, screen, runs_on_cpus(args.run_folder)), args.out
            )
    except OSError as error:
        return _report_write_error(args.out, error)
    return 0


def _load_scheduled_run(folder: Path) -> ScheduledRun:
    from compiler.cli.commands.schedule_spec import run_of  # imports pydantic
    from compiler.plan.read_files import load_with_files

    return run_of(load_with_files(folder / "spec.resolved"))


def _align_with_schedule(
    trace: list[dict[int, Line]], run: ScheduledRun, program: str | None
) -> tuple[Schedule, RecordedTimes]:
    """Return the schedule of a program, and the times that the traced steps measured for its actions.

    `trace`: the traced steps of the run's programs. `program`: default, the one with the most micro-batches.
    """
    programs = programs_of(trace)
    if not programs:
        raise TraceError("no step was traced")
    if program is not None and program not in programs:
        raise TraceError(f"no program {program[:40]!r} was traced: use one of {', '.join(programs)}")
    name = program or programs[-1]
    schedule = run.scheduler().schedule(num_micro_batches(name))
    return schedule, measure(schedule, trace, name)


def _costs(name: str, run: ScheduledRun) -> tuple[Costs, str]:
    """The costs, and a text that says where they come from."""
    if name == "plan":
        return run.costs(), "the plan's predictions"
    costs = (
        shipped_costs(name) if name in shipped_cost_names() else costs_of_json(read_text(Path(name), MOST_BYTES), name)
    )
    return costs, name
