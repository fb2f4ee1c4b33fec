"""`dsc schedule (SPEC | --name … --ranks P --micro-batches N) [--costs …] [--compare …]`: schedules, what they take.

dsc schedule --name dualpipe --ranks 8 --micro-batches 20       print a schedule of any size
dsc schedule --name 1f1b --ranks 4 --micro-batches 8 --format json   docs/json.md
dsc schedule --name dualpipe --ranks 8 --micro-batches 20 --costs F=1,I=1,W=1,FB=1.8   and what it takes, on stderr
dsc schedule --name dualpipe --ranks 16 --micro-batches 120 --costs deepseek-v3-low     with a table of costs
dsc schedule --name auto --ranks 8 --micro-batches 20 --costs FB=1.8 --cap 9            search for a better one
dsc schedule --compare zb1p,auto --ranks 8 --micro-batches 20 --costs memory.json --memory 80GB     a cap in bytes
dsc schedule --name auto --ranks 8 --micro-batches 24 --cap 4 --offload 1               activations go to the host
dsc schedule --compare dualpipe,1f1b,auto --ranks 8 --micro-batches 20 --costs FB=1.8   a table, side by side
dsc schedule --name dualpipe --ranks 8 --micro-batches 20 --format html -o timeline.html   zoom, hover; or svg
dsc schedule --compare dualpipe,1f1b --ranks 4 --micro-batches 10 --format terminal     drawn on one time axis
dsc schedule spec.dsc --format trace -o trace.json              for ui.perfetto.dev
dsc schedule spec.dsc --format text > mine.schedule             the schedule of a run, with the costs of its plan
dsc schedule mine.schedule --costs FB=1.8                       one of your own: is it legal, and what does it take
dsc schedule spec.dsc --format torch-csv                        for torch.distributed.pipelining; a CSV is read too
dsc schedule spec.dsc --format megatron-layout                  the stages' layers, for Megatron

dsc schedule --name 1f1b --ranks 8 --micro-batches 24 --costs batch.json --order        which micro-batch goes first

Costs are those of one action: one stage, one micro-batch. B costs I + W and a pair the sum of its two, unless given.
Of auto, and where schedules are compared, costs and cap are those of 1/P of the model, however it is cut.
A table of costs is JSON (docs/schedules.md), or deepseek-v3-low or deepseek-v3-high, which are in ms.

Exit codes: 0 done · 2 the command line is wrong, or there is no such schedule, of that size, within that cap
"""

from __future__ import annotations

import argparse
import re
import sys
from fractions import Fraction
from pathlib import Path

from compiler.cli.commands.common import EXIT_SPEC, add_spec_arguments, say, wrong
from compiler.cli.commands.output_files import put, refuse_output
from compiler.cli.commands.schedule_formats import FORMATS, summary
from compiler.cli.commands.schedule_input import InputError, answer_to
from compiler.schedule import AUTO, DEFAULT_CHUNKS, SCHEDULES
from compiler.schedule.memory import parse_bytes
from compiler.tools.picture.formats import TooMuchError
from dsl.facts.schedules import CHUNKED, in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    names = ", ".join((*SCHEDULES, AUTO))
    add_spec_arguments(
        parser, "a spec file, SPEC:RUN, or the file of a schedule, in the place of --ranks and --micro-batches"
    )
    parser.add_argument("--name", help=f"one of: {names}; default: the spec's")
    parser.add_argument("--ranks", type=int, metavar="P", help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of a step")
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help=f"stages a rank, of {in_words(CHUNKED)}, or one for auto to try; default: {DEFAULT_CHUNKS}, of auto some",
    )
    parser.add_argument("--costs", metavar="COSTS", help="F=1,I=1,W=1,B=2,FB=3, a JSON file, or deepseek-v3-low")
    parser.add_argument("--pairs", choices=("any",), help="any: pairs of F, B and I all gain by the factor of FB")
    parser.add_argument("--latency", metavar="L", help="time of a message to the next stage; default: 0")
    parser.add_argument("--offload", metavar="TIME", help="time of the copy of an activation to the host, and back")
    parser.add_argument("--order", action="store_true", help="search an order of micro-batches of unequal costs")
    parser.add_argument(
        "--cap", type=_cap, metavar="C", help="most activations that a rank may hold: 9, 8.5; or each rank: 8,8,7.5,7"
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="BYTES",
        help="most bytes that a rank may hold: 80GB",
    )
    parser.add_argument(
        "--copies", type=int, choices=(1, 2), help="ranks that may hold a stage, under auto; default: 2"
    )
    parser.add_argument(
        "--placement", metavar="PLACEMENT", help="what auto searches on: v, loop(3), bidirectional; default: all"
    )
    parser.add_argument("--compare", metavar="NAMES", help="several names with commas between: dualpipe,1f1b,auto")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text", help="default: text")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, help="write to a file, not to stdout")


def _cap(text: str) -> Fraction | tuple[Fraction, ...]:
    """A number, or one for each rank, with commas between. Parts: stages may be parts of 1/P of the model."""
    caps = [part.strip() for part in text.strip("[]").split(",")]
    for cap in caps:
        if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?|[0-9]{1,12}/[1-9][0-9]{0,5}", cap, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"invalid value {cap[:40]!r}: use a number such as 9 or 8.5, or one for each rank, as 8,8,7.5,7"
            )
    return tuple(map(Fraction, caps)) if len(caps) > 1 else Fraction(caps[0])


def _memory(text: str) -> Fraction:
    """Bytes as a spec writes them."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Print what was asked for and return 0, or say on stderr what to change and return 2."""
    try:
        if args.out is not None:
            refuse_output(args.out, args.spec, args.costs)  # before the work
        answer = answer_to(args)
        if answer is None:  # the mistakes of the spec are printed
            return EXIT_SPEC
        if args.order:
            from compiler.cli.commands.schedule_order import in_best_order  # it brings numpy

            answer = in_best_order(answer)
        put(FORMATS[args.format](answer), args.out)
    except InputError as error:
        return wrong(str(error), error.hint)
    except TooMuchError as error:
        return wrong(str(error))
    except OSError as error:
        if args.out is None:
            raise
        return wrong(f"{args.out} cannot be written: {error.strerror}")
    if args.format == "text" and not answer.compared:
        sys.stdout.flush()
        say("\n".join(summary(answer)))  # on stderr: what is on stdout can be read back
    return 0
