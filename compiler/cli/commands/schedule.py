"""`dsc schedule (SPEC | --name … --ranks P --micro-batches N) [--costs …] [--compare …]`: print schedules and costs.

dsc schedule --name dualpipe --ranks 8 --micro-batches 20       print a schedule of any size
dsc schedule --name 1f1b --ranks 4 --micro-batches 8 --format json   docs/json.md
dsc schedule --name dualpipe --ranks 8 --micro-batches 20 --costs F=1,I=1,W=1,FB=1.8   and its costs, on stderr
dsc schedule --name dualpipe --ranks 16 --micro-batches 120 --costs deepseek-v3-low     with a cost table
dsc schedule --name auto --ranks 8 --micro-batches 20 --costs FB=1.8 --cap 9            search for a better one
dsc schedule --compare zb1p,auto --ranks 8 --micro-batches 20 --costs memory.json --memory 80GB     with a cap in bytes
dsc schedule --name auto --ranks 8 --micro-batches 24 --cap 4 --offload 1               offload activations to the host
dsc schedule --compare dualpipe,1f1b,auto --ranks 8 --micro-batches 20 --costs FB=1.8   compare in a table
dsc schedule --name dualpipe --ranks 8 --micro-batches 20 --format html -o timeline.html   to zoom and hover; or svg
dsc schedule --compare dualpipe,1f1b --ranks 4 --micro-batches 10 --format terminal     drawn on a common time axis
dsc schedule spec.dsc --format trace -o trace.json              for ui.perfetto.dev
dsc schedule spec.dsc --format text > mine.schedule             the schedule of a run, with its plan's costs
dsc schedule mine.schedule --costs FB=1.8                       check and measure your own schedule
dsc schedule spec.dsc --format torch-csv                        for torch.distributed.pipelining; also read as SPEC
dsc schedule spec.dsc --format megatron-layout                  the layers of each stage, for Megatron

dsc schedule --name 1f1b --ranks 8 --micro-batches 24 --costs batch.json --order        search a micro-batch order

Costs are per action: one stage, one micro-batch. By default B costs I + W, and a pair the sum of its two actions.
For auto and --compare, costs and cap are for 1/P of the model, however many stages it is cut into.
A cost table is a JSON file (docs/schedules.md), or deepseek-v3-low or deepseek-v3-high, which are in ms.

Exit codes: 0 done · 2 the command line is wrong, or there is no such schedule of this size within this cap
"""

from __future__ import annotations

import argparse
import re
import sys
from fractions import Fraction
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, report_error, say
from compiler.cli.commands.output_files import refuse_output, write_or_print
from compiler.cli.commands.schedule_formats import FORMATS, summary
from compiler.cli.commands.schedule_input import InputError, answer_to
from compiler.schedule import AUTO, DEFAULT_CHUNKS, SCHEDULES
from compiler.schedule.memory import parse_bytes
from compiler.tools.picture.formats import TooMuchError
from dsl.facts.schedules import CHUNKED, join_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    names = ", ".join((*SCHEDULES, AUTO))
    add_spec_arguments(parser, "a spec file, SPEC:RUN, or a schedule file, instead of --ranks and --micro-batches")
    parser.add_argument("--name", help=f"one of: {names}; default: the spec's")
    parser.add_argument("--ranks", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches per step")
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help=f"stages per rank for {join_names(CHUNKED)}, or the only number that auto tries; "
        f"default: {DEFAULT_CHUNKS}; several for auto",
    )
    parser.add_argument("--costs", metavar="COSTS", help="F=1,I=1,W=1,B=2,FB=3, a JSON file, or deepseek-v3-low")
    parser.add_argument("--pairs", choices=("any",), help="any: the factor of FB applies to all pairs of F, B and I")
    parser.add_argument("--latency", metavar="L", help="time to send to the next stage; default: 0")
    parser.add_argument("--offload", metavar="TIME", help="time to copy an activation to or from the host")
    parser.add_argument("--order", action="store_true", help="search a good order of micro-batches with unequal costs")
    parser.add_argument(
        "--cap", type=_cap, metavar="C", help="maximum activations on a rank: 9, 8.5; or for each rank: 8,8,7.5,7"
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="BYTES",
        help="maximum bytes on a rank: 80GB",
    )
    parser.add_argument(
        "--copies", type=int, choices=(1, 2), help="for auto: number of ranks that may hold a stage; default: 2"
    )
    parser.add_argument(
        "--placement",
        metavar="PLACEMENT",
        help="for auto: the stage placement to search: v, loop(3), bidirectional; default: all",
    )
    parser.add_argument("--compare", metavar="NAMES", help="names separated by commas: dualpipe,1f1b,auto")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="default: text")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file, not to stdout")


def _cap(text: str) -> Fraction | tuple[Fraction, ...]:
    """Parse --cap: a number, or one per rank separated by commas. Fractions: stages may be less than 1/P of the
    model."""
    caps = [part.strip() for part in text.strip("[]").split(",")]
    for cap in caps:
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?|[0-9]{1,12}/[1-9][0-9]{0,5}", cap, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"invalid value {cap[:40]!r}: use a number such as 9 or 8.5, or one for each rank, such as 8,8,7.5,7"
            )
    return tuple(map(Fraction, caps)) if len(caps) > 1 else Fraction(caps[0])


def _memory(text: str) -> Fraction:
    """Parse bytes in the notation of specs."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Print the schedules. Returns the exit code."""
    try:
        if args.out is not None:
            refuse_output(args.out, args.spec, args.costs)  # before the work
        answer = answer_to(args)
        if answer is None:  # the mistakes of the spec were printed
            return EXIT_SPEC
        if args.order:
            from compiler.cli.commands.schedule_order import search_orders  # imports numpy

            answer = search_orders(answer)
        write_or_print(FORMATS[args.format](answer), args.out)
    except InputError as error:
        return report_error(str(error), error.hint)
    except TooMuchError as error:
        return report_error(str(error))
    except OSError as error:
        if args.out is None:
            raise
        return report_error(f"{args.out} cannot be written: {error.strerror}")
    if args.format == "text" and not answer.compared:
        sys.stdout.flush()
        say("\n".join(summary(answer)))  # to stderr: stdout has only the schedule, which can be read back
    return 0
