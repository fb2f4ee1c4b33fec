"""`dsc doctor [BUILD]`: check whether this node is ready for a run, and say what to fix.

dsc doctor                          devices, drivers, memory, disk, limits, network, clock, link rates
dsc doctor build/pretrain           the same, compared with what the plan needs
srun --ntasks-per-node=1 dsc doctor build/pretrain --format json

Each check takes a few seconds at most; one that does not answer is reported. Nothing is changed.

Exit codes: 0 no errors (warnings do not count) · 1 an error was found · 2 the build cannot be read
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.tools.launch.options import number
from compiler.tools.processes import call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("build", metavar="BUILD", nargs="?", type=Path, help="build that will run here")
    parser.add_argument(
        "--out", metavar="RUN", type=Path, help="run folder, whose disk is checked; default: runs/<run>"
    )
    port = number(1024, 65535, "a port")
    parser.add_argument("--port", type=port, default=29400, help="port of the first node; default: 29400")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Run the checks in a process of the runtime. Returns its exit code."""
    command = ["runtime.observe.doctor", "--port", str(args.port), "--format", args.format]
    command += ["--out", str(args.out)] if args.out is not None else []
    return call([*command, "--", *([str(args.build)] if args.build is not None else [])])
