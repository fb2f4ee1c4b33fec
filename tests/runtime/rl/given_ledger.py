"""The memory ledger of every rank for a step on fixed completions: `python -m tests.runtime.rl.given_ledger FOLDER
WORLD`. Completions are in FOLDER/given; each rank writes FOLDER/rank_<r>.json, as in tests/runtime/step/ledger.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from runtime.build.build import Build
from runtime.launch.heartbeat import Board
from runtime.step.trainer import Trainer
from tests.runtime.rl.given_ranks import policy_of
from tests.runtime.step import ledger
from tests.runtime.step.samples import RandomSamples


def measured(folder: Path, build: Build, rank: int, board: Board) -> dict[str, Any]:
    plan = build.plan
    samples, policy = RandomSamples(plan.model.vocab, plan.train.sequence), partial(policy_of, folder=folder / "given")
    trainer = Trainer(build, rank, samples, None, board, policy=policy)
    with trainer.ledger() as ledger:
        trainer.accumulate()
    return {"peak": ledger.peak, "rows": ledger.rows}


if __name__ == "__main__":
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    sys.exit(ledger.main(folder, world, partial(measured, folder)))
