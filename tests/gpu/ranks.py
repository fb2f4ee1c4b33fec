"""Ranks of a test: `python -m tests.gpu.ranks FOLDER WORLD DEVICE TRANSPORT` trains FOLDER/build, DEVICE "cpu" or
"pretend", to its end, and resumes from its own checkpoint.

Each writes FOLDER/<device>-<transport>/rank_<r>.safetensors: its weights, moments and biases, the metrics of all steps,
and the losses of a validation.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.build.build import Build
from runtime.checkpoint.publish import TensorPart
from runtime.comm.connect import Endpoint, Transport
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.ops import product
from runtime.state import snapshot
from runtime.step.trainer import Trainer
from tests.gpu.pretend import DEVICE, pretended
from tests.runtime.step.samples import RandomSamples, weight

METRICS = ("loss", "mtp_loss", "sequence_loss", "grad_norm", "imbalance")


def train(build: Build, rank: int, board: Board, device: torch.device, transport: Transport) -> dict[str, Tensor]:
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    trainer = Trainer(build, rank, samples, samples, board, Endpoint(device, transport, checked=True))
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    rows = [trainer.train_step() for _ in range(build.plan.steps)]
    trainer.settle()
    tensors = snapshot.take(trainer.state, trainer.plan, rank)
    result = {name: (t.values if isinstance(t, TensorPart) else t).cpu().clone() for name, t in tensors.items()}
    result["metrics"] = torch.tensor([[row.get(name, 0.0) for name in METRICS] for row in rows], dtype=torch.float64)
    result["loads"] = torch.stack(list(trainer.loads.values()))
    if build.plan.train.validate:
        result["validation"] = torch.tensor(list(trainer.evaluate().values()), dtype=torch.float64)
    return result


def main(folder: Path, world: int, device: str, transport: Transport) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        is_pretend = device == "pretend"
        # A processor without BF16 instructions widens the operands of products, a device does not.
        with mock.patch.object(product, "has_bf16", lambda: True), pretended() if is_pretend else nullcontext():
            torch_device = DEVICE if is_pretend else torch.device("cpu")
            result = train(Build.open(folder / "build"), rank, board, torch_device, transport)
        results_folder = folder / f"{device}-{transport}"
        results_folder.mkdir(exist_ok=True)
        save_file(result, results_folder / f"rank_{rank}.safetensors")

    outcome = launch(
        target, world, folder=folder, supervision=Supervision(hang_timeout_s=120), backend="gloo" if world > 1 else None
    )
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    chosen: Transport = "gloo" if sys.argv[4] == "gloo" else "memory"
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], chosen))
