"""`dsc data show|prepare [SPEC]`: what a run trains on, as tokens; or prepare it before the run.

dsc data show chat.dsc                            the first row, and what becomes of all rows
dsc data show chat.dsc --row 17                   another one; rows are counted from 0; of prompts, with their answers
dsc data show chat.dsc --sequence 3               rows that are packed, or documents that are masked, in a sequence
dsc data show chat.dsc --split validation --format json
dsc data prepare web.dsc --jobs 8                 filter and encode the text in eight processes, and keep it for runs
dsc data prepare web.dsc --format json

`show`: the loss is on what is coloured, or between ⟦ and ⟧ where nothing shows colours. The text is encoded as `dsc
train` does it, in a folder that is removed afterwards; with --cache DIR, or in a folder with build/.data, it is kept
for runs.

`prepare` puts the data into build/.data, or below --cache DIR. `dsc train` in the same folder, or with the same
--cache, finds it there and encodes nothing. If the command is interrupted or killed, call it again: it goes on behind
the last part that was encoded. The result has the same bytes for any --jobs.

Exit codes: 0 done · 2 the spec, the data or the command line is wrong · 75 the disk is full
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from compiler.cli.commands import data_prepare, data_show
from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, load_phases, load_spec, reason, wrong
from compiler.cli.commands.compile import add_cache
from runtime.system.outcome import refusal_code

MAX_JOBS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("what", choices=("show", "prepare"), metavar="show|prepare", help="what to do with the data")
    add_spec_arguments(parser)
    parser.add_argument("--row", metavar="N", type=int, help="which row, from 0, the default; of text, which window")
    parser.add_argument(
        "--sequence", metavar="N", type=int, help="a sequence of packed rows or masked documents instead, from 0"
    )
    parser.add_argument("--of", metavar="NAME", help="which of several sources; default: the first")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="default: train")
    parser.add_argument(
        "--data", metavar="DIR", type=Path, help="where the paths of the data start; default: the folder of the spec"
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=jobs,
        default=None,
        help="processes that filter and encode; default: one for each core",
    )
    add_cache(parser)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text or json (docs/json.md)")


def jobs(text: str) -> int:
    """The number of processes of --jobs."""
    number = int(text)
    if not 1 <= number <= MAX_JOBS:
        raise ValueError
    return number


def _of_show(args: argparse.Namespace) -> str:
    """An option that is of `show` alone, "" where none is given."""
    given = {"--row": args.row, "--sequence": args.sequence, "--of": args.of, "--split": args.split != "train" or None}
    return next((name for name, value in given.items() if value is not None), "")


def run(args: argparse.Namespace) -> int:
    """Show a row, or prepare the data; 0, or 2 where the spec or its data cannot be used."""
    from runtime.data.files import DataError, MissingError, where_paths_start

    if args.what == "prepare" and (given := _of_show(args)):
        return wrong(f"`dsc data prepare` takes no {given}", how=args.format)
    if args.what == "show" and args.jobs:
        return wrong("`dsc data show` takes no --jobs", how=args.format)

    if args.what == "prepare":
        phases = load_phases(args.spec, args.set, args.format)
    else:
        phases = None if (found := load_spec(args.spec, args.set, args.format)) is None else [found]
    if phases is None:
        return EXIT_SPEC
    chosen = phases[0]
    folder = args.data or chosen.path.parent
    try:
        if args.what == "prepare":
            prepared = data_prepare.prepare(args, chosen.spec, folder)
            data_prepare.show(args, prepared, [each.spec for each in phases])
            return 0
        with TemporaryDirectory(prefix="dsc-data-", ignore_cleanup_errors=True) as out:
            shown = data_show.shown(args, chosen.spec, folder, Path(out))
    except (DataError, OSError) as error:
        wrong(reason(error), where_paths_start(folder) if isinstance(error, MissingError) else "", args.format)
        return refusal_code(error)
    data_show.show(args, shown)
    return 0
