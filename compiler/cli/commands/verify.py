"""`dsc verify CHECKPOINT|RUN|BUILD`: check that it is intact, and say what can load it.

dsc verify build/quickstart                                    its digest, its files, its versions
dsc verify runs/quickstart                                     its checkpoints, its data, its metrics
dsc verify runs/quickstart/checkpoints/step-00000130           every shard, and which builds can resume from it

Nothing is executed, and nothing is written.

Exit codes: 0 intact · 1 damaged · 2 the folder is not a checkpoint, run or build
"""

from __future__ import annotations

import argparse
from pathlib import Path

from compiler.tools.processes import call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a checkpoint, a run or a build")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    """Verify in a process of the runtime. Returns its exit code."""
    return call(["runtime.checkpoint.verify", "--format", args.format, "--", str(args.folder)])
