"""`dsc trace RUN STEP`: write a step of a run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

dsc trace runs/quickstart 20 -o step.json      what each rank ran when, and where the time of the step went
dsc trace runs/quickstart 57 --again           train step 57 again, which was not traced, and trace it

Runs trace steps 1 to 32, then 64, 128, 256, … With --again any other step is trained again like `dsc replay` does, from
the checkpoint before it; the times are then those of this machine now, and the run is not changed. Ranks on one machine
share a clock. If several machines do not, each rank starts at 0.

Exit codes: 0 done · 1 a rank failed · 2 the folder holds no run, or not this step · 3 hung · 4 the step is written, but
its numbers differ from the run · 75 a disk is full
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compiler.cli.commands.common import EXIT_DIFFERS, EXIT_SPEC, is_missing, reason, report_error, say
from compiler.cli.commands.output_files import write_or_print
from compiler.cli.commands.replay import SHOWN, TRAINED, step_number
from compiler.files.text import TextFileError
from compiler.tools.picture.recorded import Line, TraceError
from compiler.tools.picture.trace_events import step_events, step_of
from compiler.tools.processes import call
from compiler.tools.report.long_metrics import step_rows

EXIT_OTHER = 4  # the numbers of the new training differ from the run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("step", metavar="STEP", type=step_number, help="a step of the run")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file; default: stdout")
    parser.add_argument("--again", action="store_true", help="train the step again, if it was not traced, and trace it")
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=Path(),
        help="with --again: folder that the data's paths are relative to",
    )


def run(args: argparse.Namespace) -> int:
    """Write the step. Returns the exit code."""
    if is_missing(args.run_folder):
        return EXIT_SPEC
    try:
        return _write_trace(args, args.run_folder, step_of(args.run_folder, args.step))
    except (TraceError, OSError) as error:
        if not args.again:
            return report_error(f"{args.run_folder}: {reason(error)}", "--again trains the step again, and traces it")
    with TemporaryDirectory(prefix="dsc-trace-", ignore_cleanup_errors=True) as folder:
        replay_folder = Path(folder) / "again"
        words = ["replay", str(args.run_folder), str(args.step), "--out", str(replay_folder), "--data", str(args.data)]
        code = call(["compiler.cli.main", *words], quiet=True)
        differs = code == EXIT_DIFFERS and (replay_folder / SHOWN).is_file()  # without the file, a rank failed
        if code and not differs:
            return code
        if differs:
            say(f"the numbers of step {args.step} differ from the run: `dsc replay` shows which")
        try:
            code = _write_trace(args, replay_folder / TRAINED, step_of(replay_folder / TRAINED, args.step))
            return code or (EXIT_OTHER if differs else 0)
        except (TraceError, OSError) as error:
            return report_error(f"{args.run_folder}: {reason(error)}")


def _write_trace(args: argparse.Namespace, trained: Path, lines: list[Line]) -> int:
    """Write the trace of a step, with its metrics row in the folder `trained`. Returns the exit code."""
    row: Mapping[str, Any] = {}
    with suppress(TextFileError):  # the breakdown of the time is optional
        row = next((row for row in step_rows(trained / "metrics.jsonl").rows if row["step"] == args.step), {})
    try:
        write_or_print(step_events(args.run_folder.resolve().name, args.step, lines, row), args.out)
    except OSError as error:
        if args.out is None:
            raise
        return report_error(f"{args.out} cannot be written: {error.strerror}")
    return 0
