"""Starts the ranks of a test, which are modules beside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import progress

ROOT = Path(__file__).parents[2]


def run_module(module: str, folder: Path, world: int, *more: str) -> None:
    """`python -m module FOLDER WORLD …`, one thread a rank; its output where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, str(folder), str(world), *more]
    done = progress.run(command, Path.cwd(), environment)
    assert done.returncode == 0, done.stdout + done.stderr
