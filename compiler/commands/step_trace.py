"""`dsc trace RUN STEP`: one step of a run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

dsc trace runs/quickstart 20 -o step.json      what each rank ran when, and where the time of the step went

Steps 1 to 32, then 64, 128, 256, … are traced. Ranks of one machine share a clock; where those of several do not, each
rank begins at 0.

Exit codes: 0 done · 2 the folder holds no run, or not this step
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from compiler.commands.common import EXIT_SPEC, is_missing, reason, wrong
from compiler.commands.output_files import put
from compiler.picture.recorded import TraceError
from compiler.picture.step_events import step_events, step_of
from compiler.report.run_page import step_rows
from compiler.textfile import TextFileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("step", metavar="STEP", type=int, help="a step that was traced")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file; default: stdout")


def run(args: argparse.Namespace) -> int:
    """Write the step; 0, or 2 where it is not there."""
    if is_missing(args.run_folder):
        return EXIT_SPEC
    try:
        lines = step_of(args.run_folder, args.step)
    except (TraceError, OSError) as error:
        return wrong(f"{args.run_folder}: {reason(error)}")
    row: Mapping[str, Any] = {}
    with suppress(TextFileError):  # where the time went is more than is asked for
        row = next((row for row in step_rows(args.run_folder / "metrics.jsonl")[0] if row["step"] == args.step), {})
    try:
        put(step_events(args.run_folder.resolve().name, args.step, lines, row), args.out)
    except OSError as error:
        if args.out is None:
            raise
        return wrong(f"{args.out} cannot be written: {error.strerror}")
    return 0
