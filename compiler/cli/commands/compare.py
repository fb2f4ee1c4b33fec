"""`dsc compare RUN RUN… [--format text|json|html] [-o FILE]`: compare several runs.

dsc compare runs/base runs/ablation                  final figures, and the differences of their specs
dsc compare runs/* --format html -o compared.html    one page with curves over tokens, time and steps
dsc compare runs/* --format json                     for programs (docs/json.md)

A run that is still training is compared by the steps it has done so far.

Exit codes: 0 compared · 2 a folder holds no run, or the command line is wrong
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cli.commands.common import EXIT_SPEC, is_missing, reason, report_error
from compiler.cli.commands.output_files import refuse_output, write_or_print
from dsl.messages.diagnostics import make_visible

if TYPE_CHECKING:
    from compiler.tools.report.compared import RunComparison

VERSION = 1  # of the JSON, docs/json.md
MAX_RUNS = 64  # runs: more curves cannot be distinguished


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="run folder, written by dsc train or torchrun"
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "html"),
        default="text",
        help="text, json (docs/json.md) or html (a page with curves); default: text",
    )
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file, not to stdout")


def run(args: argparse.Namespace) -> int:
    """Print the comparison."""
    folders = list({os.path.realpath(folder): folder for folder in args.runs}.values())
    if len(folders) < 2:
        return report_error(
            "a comparison needs at least two runs", "name another run, or use dsc report RUN", args.format
        )
    if len(folders) > MAX_RUNS:
        return report_error(f"{len(folders)} runs are more than the maximum of {MAX_RUNS}", "name fewer", args.format)
    if any([is_missing(folder) for folder in folders]):
        return EXIT_SPEC
    from compiler.tools.report.compared import compare, names_of, read_run

    try:
        if args.out is not None:
            refuse_output(args.out, *(folder / "metrics.jsonl" for folder in folders))
    except OSError as error:
        return _report_write_error(args, error)
    runs, mistakes = [], []
    for folder, name in zip(folders, names_of(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
        except (OSError, ValueError) as error:
            mistakes.append(f"{folder} holds no run that can be compared: {reason(error)}")
    if mistakes:
        return [report_error(text, output_format=args.format if text is mistakes[-1] else "text") for text in mistakes][
            -1
        ]
    try:
        write_or_print(RENDERERS[args.format](compare(runs)), args.out)
    except OSError as error:
        if args.out is None:
            raise
        return _report_write_error(args, error)
    return 0


def _report_write_error(args: argparse.Namespace, error: OSError) -> int:
    return report_error(f"{args.out} cannot be written: {error.strerror}", output_format=args.format)


def _html(compared: RunComparison) -> str:
    from compiler.tools.report.compared import compare_html  # imports jinja2

    return compare_html(compared)


def table(compared: RunComparison) -> str:
    """The figures of the runs, one line per run."""
    from compiler.tools.report.compared import view_of

    view, names = view_of(compared), [run.name for run in compared.runs]
    return align_columns(["run", *view.heads], [[name, *row] for name, row in zip(names, view.table, strict=True)])


def _text(compared: RunComparison) -> str:
    from compiler.tools.report.compared import view_of

    view, names = view_of(compared), [run.name for run in compared.runs]
    parts = [table(compared)]
    if compared.common_tokens is not None:
        tokens = f"{compared.common_tokens:,}"
        parts.append(f"Losses are means of the last 10 steps; at equal tokens, after the first {tokens} tokens.")
    if compared.differences:
        parts.append(
            align_columns(
                ["key", *names], [[difference.path, *difference.values] for difference in compared.differences]
            )
        )
    elif not compared.unread:
        parts.append("Their specs do not differ.")
    return "\n\n".join([*parts, *view.notes]) + "\n"


def align_columns(heads: list[str], rows: list[list[str]]) -> str:
    """A text table. The first column is aligned to the left, the others to the right."""
    cells = [[make_visible(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    lines = (
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def document(compared: RunComparison) -> dict[str, Any]:
    """The document that docs/json.md describes."""
    return {
        "version": VERSION,
        "common_tokens": compared.common_tokens,
        "runs": [
            {"name": run.name, "folder": str(run.folder), "damaged_rows": run.damaged, **asdict(figures)}
            for run, figures in zip(compared.runs, compared.figures, strict=True)
        ],
        "differences": [
            {"path": difference.path, "values": list(difference.values)} for difference in compared.differences
        ],
        "without_spec": list(compared.unread),
    }


def _json(compared: RunComparison) -> str:
    return json.dumps(document(compared), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


RENDERERS = {"text": _text, "json": _json, "html": _html}
