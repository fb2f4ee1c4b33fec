"""`dsc schedule --name dualpipe --ranks 8 --micro-batches 20 --format text`: print a schedule of any size.

dsc schedule --name dualpipe --ranks 8 --micro-batches 20
dsc schedule --name 1f1b --ranks 4 --micro-batches 8 --format json   docs/json.md

Exit codes: 0 done · 2 there is no such schedule, or none of that size
"""

from __future__ import annotations

import argparse
import sys

from compiler.schedules import SCHEDULES

# Bounds before work: the largest published pipelines have 16 to 64 ranks; a million actions take a few seconds.
MAX_RANKS = 512
MAX_MICRO_BATCHES = 65_536
MAX_CELLS = 2**19  # ranks x micro-batches; each is a forward and a backward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--name", required=True, help=f"one of: {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", required=True, type=int, metavar="P", help="pipeline ranks")
    parser.add_argument("--micro-batches", required=True, type=int, metavar="N", help="micro-batches of a step")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Print the schedule to stdout and return 0, or say on stderr what to change and return 2."""
    fault = _fault(args.name, args.ranks, args.micro_batches)
    if fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    try:
        schedule = SCHEDULES[args.name](args.ranks, args.micro_batches)
    except ValueError as error:  # a size this schedule does not have
        print(f"error: {error}", file=sys.stderr)
        return 2
    schedule.check()
    print(schedule.to_text() if args.format == "text" else schedule.to_json() + "\n", end="")
    return 0


def _fault(name: str, num_ranks: int, num_micro_batches: int) -> str:
    if name not in SCHEDULES:
        return f"unknown schedule {name[:40]!r}: use one of {', '.join(SCHEDULES)}"
    if not 1 <= num_ranks <= MAX_RANKS:
        return f"--ranks {num_ranks} is out of bounds: use 1 to {MAX_RANKS}"
    if not 1 <= num_micro_batches <= MAX_MICRO_BATCHES:
        return f"--micro-batches {num_micro_batches} is out of bounds: use 1 to {MAX_MICRO_BATCHES}"
    if num_ranks * num_micro_batches > MAX_CELLS:
        most = MAX_CELLS // num_ranks
        return (
            f"{num_ranks} ranks x {num_micro_batches} micro-batches is too large: use --micro-batches {most} or fewer"
        )
    return ""
