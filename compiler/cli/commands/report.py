"""`dsc report RUN`: write the report of a run folder.

dsc report runs/quickstart         writes runs/quickstart/report.html, such as after torchrun
dsc report runs/quickstart --format json   also prints speed, MFU, goodput and lost time by cause

Exit codes: 0 the report is written · 2 the folder holds no run
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, is_missing, reason, report_error, report_mistakes
from compiler.tools.report.run_page import write_run_report
from compiler.tools.report.summary import summary_of
from dsl.messages.diagnostics import SpecError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="run folder, written by dsc train or torchrun")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Write RUN/report.html. Returns the exit code."""
    if is_missing(args.run_folder):
        return EXIT_SPEC
    try:
        path, report = write_run_report(args.run_folder)
    except SpecError as error:
        if args.format == "text":
            report_mistakes(error.diagnostics)
        message = f"{args.run_folder} holds no run that can be reported: its spec.resolved is damaged or missing"
        return report_error(message, output_format=args.format)
    except (OSError, ValueError) as error:
        return report_error(
            f"{args.run_folder} holds no run that can be reported: {reason(error)}", output_format=args.format
        )
    summary = summary_of(report)
    assert summary is not None, "a report of a run has a summary"
    if args.format == "json":
        document = {"version": 1, "run": report.name, "report": str(path)}
        print(json.dumps(document | summary.to_json(), indent=2))
    else:
        print(f"report: {path}")
    return 0
