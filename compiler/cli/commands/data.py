"""`dsc data show|prepare [SPEC]`: show the training data as tokens, or prepare it before the run.

dsc data show chat.dsc                            the first row, and how all rows are used
dsc data show chat.dsc --row 17                   row 17, counted from 0; prompts are shown with their answers
dsc data show chat.dsc --sequence 3               a sequence of packed rows or masked documents
dsc data show chat.dsc --split validation --format json
dsc data prepare web.dsc --jobs 8                 filter and encode the text in eight processes
dsc data prepare web.dsc --format json

`show` colours the tokens that have a loss, or puts them between ⟦ and ⟧ where colours are not shown. It encodes the
text as `dsc train` does, in a temporary folder; with --cache DIR, or if build/.data exists, the result is kept for
runs.

`prepare` writes the data to build/.data, or below --cache DIR. `dsc train` in the same folder, or with the same
--cache, reuses it. If the command is interrupted or killed, run it again: it continues after the last encoded part. The
result has the same bytes for any --jobs.

Exit codes: 0 done · 2 the spec, the data or the command line is wrong · 75 the disk is full
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from compiler.cli.commands import data_prepare, data_show
from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, load_phases, load_spec, reason, report_error
from compiler.cli.commands.compile import add_cache
from runtime.system.outcome import refusal_code

MAX_JOBS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("what", choices=("show", "prepare"), metavar="show|prepare", help="what to do with the data")
    add_spec_arguments(parser)
    parser.add_argument(
        "--row", metavar="N", type=int, help="the row, or window of a text, to show, counted from 0; default: 0"
    )
    parser.add_argument(
        "--sequence",
        metavar="N",
        type=int,
        help="show a sequence of packed rows or masked documents instead, counted from 0",
    )
    parser.add_argument("--of", metavar="NAME", help="the source to show, if there are several; default: the first")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="default: train")
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="folder that the data's paths are relative to; default: the folder of the spec",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=jobs,
        default=None,
        help="processes that filter and encode; default: one per core",
    )
    add_cache(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def jobs(text: str) -> int:
    """Parse --jobs."""
    number = int(text)
    if not 1 <= number <= MAX_JOBS:
        raise ValueError
    return number


def _show_option(args: argparse.Namespace) -> str:
    """The first given option that only `show` has, or ""."""
    options = {
        "--row": args.row,
        "--sequence": args.sequence,
        "--of": args.of,
        "--split": args.split != "train" or None,
    }
    return next((name for name, value in options.items() if value is not None), "")


def run(args: argparse.Namespace) -> int:
    """Show a row, or prepare the data. Returns the exit code."""
    from runtime.data.files import DataError, MissingError, path_start_hint

    if args.what == "prepare" and (option := _show_option(args)):
        return report_error(f"`dsc data prepare` takes no {option}", output_format=args.format)
    if args.what == "show" and args.jobs:
        return report_error("`dsc data show` takes no --jobs", output_format=args.format)

    if args.what == "prepare":
        phases = load_phases(args.spec, args.set, args.format)
    else:
        phases = None if (phase := load_spec(args.spec, args.set, args.format)) is None else [phase]
    if phases is None:
        return EXIT_SPEC
    chosen = phases[0]
    folder = args.data or chosen.path.parent
    try:
        if args.what == "prepare":
            prepared = data_prepare.prepare(args, chosen.spec, folder)
            data_prepare.show(args, prepared, [phase.spec for phase in phases])
            return 0
        with TemporaryDirectory(prefix="dsc-data-", ignore_cleanup_errors=True) as scratch:
            sample = data_show.requested_row(args, chosen.spec, folder, Path(scratch))
    except (DataError, OSError) as error:
        report_error(reason(error), path_start_hint(folder) if isinstance(error, MissingError) else "", args.format)
        return refusal_code(error)
    data_show.show(args, sample)
    return 0
