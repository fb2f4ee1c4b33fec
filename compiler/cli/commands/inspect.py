"""`dsc inspect RUN`: compare a run with its plan: every action, its time and its deviation; and
`dsc inspect BUILD --kernels`: list the kernels of a build, and the ops that were fused.

dsc inspect runs/quickstart                                 on the terminal
dsc inspect runs/quickstart --format html -o timeline.html  a page to zoom and hover
dsc inspect runs/quickstart --costs plan                    compare with the times predicted before the run
dsc inspect runs/quickstart --write-costs here.json         then: dsc schedule … --costs here.json
dsc inspect runs/long --phase 2                             an earlier phase than the last trained
dsc inspect build/quickstart --kernels                      its kernels, and the bytes that fusing saves

Exit codes: 0 done · 1 a rank ran its actions in another order than planned · 2 the folder holds no traced run, or no
build
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.cli.commands.common import EXIT_DIFFERS, EXIT_SPEC, is_missing, reason, refused, wrong
from compiler.cli.commands.output_files import is_file, status, write, write_or_print
from compiler.files.text import read_text
from compiler.schedule.costs import MOST_BYTES, Costs, costs_of_json, shipped, shipped_names
from compiler.schedule.schedule import Schedule
from compiler.tools.picture.formats import FORMATS, render, screen_of
from compiler.tools.picture.panel import measured_picture
from compiler.tools.picture.recorded import (
    Line,
    OrderError,
    RecordedTimes,
    TraceError,
    fitted,
    json_of_costs,
    measure,
    num_micro_batches,
    of_programs,
    programs_of,
    read_trace,
)
from dsl.messages.diagnostics import SpecError
from runtime.build.run_copy import described

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
        help="costs of the plan shown, in ms: a file, or `plan` for the predicted ones; default: the measured ones",
    )
    parser.add_argument("--format", choices=(*FORMATS, "json"), default="terminal", help="default: terminal")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file")
    parser.add_argument("--write-costs", metavar="FILE", type=Path, help="write the measured costs, for dsc schedule")


def run(args: argparse.Namespace) -> int:
    """Draw the picture, or list the kernels. Returns the exit code."""
    if args.kernels:
        return _kernels(args)
    if args.format == "json":
        return wrong("--format json needs --kernels; the trace of a run is JSON already, in its folder trace/")
    if is_missing(args.run_folder):
        return EXIT_SPEC
    if _is_build(args.run_folder):
        return wrong(
            f"{args.run_folder} is a build, which has no trace: name a run folder, as written by dsc train",
            f"`dsc inspect {args.run_folder} --kernels` lists the kernels of a build",
        )
    place = described(args.run_folder, args.phase)
    if args.phase is not None and place == args.run_folder:
        return wrong(
            f"{args.run_folder} has not trained phase {args.phase}", "its metrics.jsonl lists the phases under `phase`"
        )
    try:
        run = _run(place)
        trace = read_trace(args.run_folder, run.plan.mesh.world)
        schedule, measured, left_out = _measured(of_programs(place, trace), run, args.program)
        measured_costs = fitted(schedule, measured)
        costs, source = _costs(args.costs, run) if args.costs else (measured_costs, "the costs measured in this run")
        title = f"{args.run_folder.name}: {schedule.name}"
        picture = measured_picture(title, schedule, costs, measured, source, left_out)
        contents = render(picture, args.format)
    except OrderError as error:
        wrong(f"{args.run_folder}: {error}")
        return EXIT_DIFFERS
    except SpecError as error:
        refused(error.diagnostics)
        return wrong(f"{args.run_folder} cannot be inspected: its spec.resolved is damaged or missing")
    except (OSError, ValueError) as error:
        return wrong(f"{args.run_folder} cannot be inspected: {reason(error)}")
    try:
        if args.write_costs:
            write(args.write_costs, json_of_costs(measured_costs).encode())
        write_or_print(contents, args.out)
    except OSError as error:
        return _unwritten(args.out, error)
    return 0


def _unwritten(path: Path | None, error: OSError) -> int:
    """Print which file cannot be written. Errors of stdout are raised."""
    if path is None and error.filename is None:
        raise error
    return wrong(f"{error.filename or path} cannot be written: {error.strerror}")


def _is_build(folder: Path) -> bool:
    """Whether a folder is a build of dsc compile, not a run."""
    return is_file(folder / "manifest.json") and status(folder / "trace") is None


def _kernels(args: argparse.Namespace) -> int:
    from compiler.cli.commands.inspect_kernels import FILE, read, runs_on_cpus, text, to_json
    from runtime.build.files import BuildError

    if args.format not in ("terminal", "json"):
        return wrong(f"--kernels has no --format {args.format}: use terminal or json")
    if args.program or args.costs or args.write_costs:
        return wrong("--kernels is for builds; --program, --costs and --write-costs are for runs")
    try:
        kernels = read(args.run_folder)
    except BuildError as error:
        return wrong(str(error))
    except ValueError:
        return wrong(f"{args.run_folder} has no readable {FILE}: name a folder written by this version of dsc compile")
    try:
        if args.format == "json":
            write_or_print(to_json(kernels), args.out)
        else:
            screen = screen_of(sys.stdout) if args.out is None and sys.stdout.isatty() else None
            write_or_print(
                text(args.run_folder.resolve().name, kernels, screen, runs_on_cpus(args.run_folder)), args.out
            )
    except OSError as error:
        return _unwritten(args.out, error)
    return 0


def _run(folder: Path) -> ScheduledRun:
    from compiler.cli.commands.schedule_spec import run_of  # imports pydantic
    from compiler.plan.read_files import load_with_files

    return run_of(load_with_files(folder / "spec.resolved"))


def _measured(
    steps: tuple[list[dict[int, Line]], int], run: ScheduledRun, program: str | None
) -> tuple[Schedule, RecordedTimes, int]:
    """The schedule, its measured times, and the number of traced steps of other programs.

    `steps`: the traced steps of the run's programs, and the number of other steps.
    """
    trace, left_out = steps
    programs = programs_of(trace)
    if not programs:
        raise TraceError("no step was traced")
    if program is not None and program not in programs:
        raise TraceError(f"no program {program[:40]!r} was traced: use one of {', '.join(programs)}")
    name = program or programs[-1]
    schedule = run.scheduler().schedule(num_micro_batches(name))
    return schedule, measure(schedule, trace, name), left_out


def _costs(name: str, run: ScheduledRun) -> tuple[Costs, str]:
    """The costs, and a text that says where they come from."""
    if name == "plan":
        return run.costs(), "the plan's predictions"
    return shipped(name) if name in shipped_names() else costs_of_json(read_text(Path(name), MOST_BYTES), name), name
