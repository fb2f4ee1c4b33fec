"""Ranks of a test: `python -m tests.gpu.graph_ranks FOLDER WORLD MODE` trains STEPS steps of FOLDER/build on the
pretend device, with its graphs, or, if MODE is "plain", without.

Each writes FOLDER/<mode>_<r>.safetensors: its weights, moments and metrics; and FOLDER/<mode>_<r>.json: what its device
sees in each step and the following validation, and the calls of segments that were captured.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.build.build import Build
from runtime.checkpoint.publish import TensorPart
from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from tests.gpu.pretend import DEVICE, Kind, pretended
from tests.gpu.pretend_graphs import POOLS, pretended_graphs
from tests.gpu.ranks import METRICS
from tests.runtime.step.samples import RandomSamples, weight

STEPS = 4


def main(folder: Path, world: int, mode: str) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        seen: list[str] = []
        steps: list[list[str]] = []

        def see(kind: Kind, what: str, stream: str) -> None:
            seen.append(f"{kind} {what} on {stream}")

        with ExitStack() as stack:
            for context in (pretended(see), pretended_graphs()):
                stack.enter_context(context)
            build = Build.open(folder / "build")
            samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
            trainer = Trainer(build, rank, samples, samples, board, Endpoint(DEVICE, "gloo"))
            for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
                bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
            trainer.executor.graphs.is_on = mode == "graphs"
            rows = []
            for _ in range(STEPS):
                seen.clear()
                rows.append(trainer.train_step())
                if build.plan.train.validate:
                    rows[-1] |= {f"v_{name}": value for name, value in trainer.evaluate().items()}
                steps.append([*seen])
            tensors = snapshot.take(trainer.state, trainer.plan, rank)
            result = {name: (t.values if isinstance(t, TensorPart) else t).cpu() for name, t in tensors.items()}
        names = (*METRICS, *(name for name in rows[0] if name.startswith("v_")))
        result["metrics"] = torch.tensor([[row.get(name, 0.0) for name in names] for row in rows], dtype=torch.float64)
        save_file({name: tensor.clone() for name, tensor in result.items()}, folder / f"{mode}_{rank}.safetensors")
        captured = {name: len(of_program) for name, of_program in trainer.executor.graphs._of_program.items()}
        facts = {"steps": steps, "captured": captured, "pool_bytes": sum(pool.num_bytes for pool in POOLS)}
        (folder / f"{mode}_{rank}.json").write_text(json.dumps(facts), "utf-8")

    outcome = launch(
        target, world, folder=folder, supervision=Supervision(hang_timeout_s=120), backend="gloo" if world > 1 else None
    )
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
