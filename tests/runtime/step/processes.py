"""Starts the ranks of a test, which are modules beside it."""

from __future__ import annotations

from pathlib import Path

from tests import forks


def run_module(module: str, folder: Path, world: int, *more: str) -> None:
    """Run `python -m module FOLDER WORLD …` with one thread per rank. Shows its output if it fails."""
    done = forks.run(module, [str(folder), str(world), *more], Path.cwd())
    assert done.returncode == 0, done.stdout + done.stderr
