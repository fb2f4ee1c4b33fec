"""Ranks that run the first step of FOLDER/build: `python -m tests.runtime.step.wide_ranks FOLDER WORLD WAY…`.

A way is `run` (as the build runs), or the rounding of float64: `exact`, `nearest`, or the seed of random rounding. Each
rank writes its gradients and the losses to FOLDER/<way>/rank_<r>.safetensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from tests.runtime.step.test_fp8 import step
from tests.runtime.step.wide_fp8 import Rounding

WAYS: dict[str, Rounding | None] = {"run": None, "exact": False, "nearest": True}


def main(folder: Path, world: int, ways: list[str]) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for way in ways:
            rounding = WAYS[way] if way in WAYS else torch.Generator().manual_seed(world * int(way) + rank)
            results = step(folder / "build", rounding, rank, board, Endpoint(checked=True))
            (folder / way).mkdir(exist_ok=True)
            save_file(results, folder / way / f"rank_{rank}.safetensors")

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
