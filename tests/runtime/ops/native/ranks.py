"""`python -m tests.runtime.ops.native.ranks FOLDER WORLD`: each forked rank writes which library its ops use, and
a result."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.ops import rmsnorm
from runtime.ops.native import library


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        x = torch.arange(12.0).view(3, 4)
        assert library.runs_natively(x)
        y, _ = rmsnorm(x, torch.ones(4), 1e-6)
        (folder / f"rank_{rank}").write_text(f"{library.identity()} {y.sum().item()}", "utf-8")

    return launch(target, world, folder=folder, supervision=Supervision(hang_timeout_s=60)).exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
