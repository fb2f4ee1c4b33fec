"""`dsc report RUN`: write the report of a run folder again, or for the first time after torchrun.

dsc report runs/quickstart         after torchrun, or again: writes runs/quickstart/report.html

Exit codes: 0 the report is written · 2 the folder holds no run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.commands.common import EXIT_SPEC, is_missing, reason, refused, wrong
from compiler.report.run_page import write_run_report
from dsl.diagnostics import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")


def run(args: argparse.Namespace) -> int:
    """Write RUN/report.html; 0, or 2 where the folder holds no run."""
    if is_missing(args.run_folder):
        return EXIT_SPEC
    try:
        path = write_run_report(args.run_folder)
    except SpecError as error:
        refused(error.diagnostics)
        return wrong(f"{args.run_folder} holds no run that can be reported: its spec.resolved is damaged or missing")
    except (OSError, ValueError) as error:
        return wrong(f"{args.run_folder} holds no run that can be reported: {reason(error)}")
    print(f"report: {path}")
    return 0
