"""A contestant: dsc, from a build of `dsc compile`, with ranks launched as by `dsc train`.

    python -m benchmarks.speed.ours BUILD CORPUS --wire READ,WRITE

One thread per rank. Traces and checkpoints are not written, as the other contestants write none.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.speed.serve import serve
from runtime.build.build import Build
from runtime.contract import EXTRA_TOKENS
from runtime.data.samples import Samples
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.step.trainer import Trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--wire", required=True)
    args = parser.parse_args()
    build = Build.open(args.build)
    mesh, train = build.plan.mesh, build.plan.train

    def target(rank: int, world: int, board: Board) -> None:
        samples = Samples(args.corpus, "train", train.sequence, EXTRA_TOKENS, seed=train.seed)
        trainer = Trainer(build, rank, samples, None, board)

        def step() -> float:
            board.start_step(trainer.step + 1)
            return float(trainer.train_step()["loss"])

        serve(args.wire, step, {"threads": torch.get_num_threads(), "processes": world}, rank, world)

    with tempfile.TemporaryDirectory(prefix="dsc-speed-") as folder:
        outcome = launch(target, mesh.world, folder=Path(folder), supervision=Supervision(hang_timeout_s=None))
        if not outcome.ok:
            print(f"{outcome}\n{outcome.detail}")
            print(*(log.read_text("utf-8") for log in sorted((Path(folder) / "logs").iterdir())), sep="\n")
    sys.stdout.flush()
    return outcome.exit_code


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
