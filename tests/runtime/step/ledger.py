"""The memory ledger of every rank for one step. `python -m tests.runtime.step.ledger FOLDER WORLD` writes
FOLDER/rank_<r>.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.step.trainer import Trainer
from tests.runtime.step.samples import RandomSamples


def measured(build: Build, rank: int, board: Board) -> dict[str, Any]:
    plan = build.plan
    samples = RandomSamples(plan.model.vocab, plan.train.sequence)
    trainer = Trainer(build, rank, samples, samples, board)
    with trainer.ledger() as ledger:
        trainer.accumulate()
    return {"peak": ledger.peak, "rows": ledger.rows, "host_bytes": trainer.executor.host.num_bytes}


Measure = Callable[[Build, int, Board], dict[str, Any]]  # by a rank


def main(folder: Path, world: int, measure: Measure = measured) -> int:
    """Launch the build of a folder. Each rank writes its measurements into the folder."""

    def target(rank: int, world: int, board: Board) -> None:
        text = json.dumps(measure(Build.open(folder / "build"), rank, board))
        (folder / f"rank_{rank}.json").write_text(text)

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
