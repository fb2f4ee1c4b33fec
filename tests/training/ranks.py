"""Ranks of a differential test: `python -m tests.training.ranks FOLDER WORLD TRANSPORT` trains every build below
FOLDER/builds.

Each rank leaves FOLDER/out/<build>/rank_<r>.safetensors: every logical gradient it holds after the first backward,
every logical weight, moment and bias after the last step, and the losses and norms of all steps; and beside it its
trace, as in a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime import run_copy
from runtime.build import Build
from runtime.comm.connect import Endpoint, Transport
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.launch.rank_watch import Supervision
from runtime.trace import Trace
from runtime.trainer import Trainer
from tests.training.recorded import Recorded, nothing_else
from tests.training.samples import RandomSamples, weight


def logical(trainer: Trainer, prefix: str, flat: str) -> dict[str, Tensor]:
    return {
        f"{prefix}/{entry.name}": value.clone()
        for _, entry, value in trainer.state.logical(lambda bucket: getattr(bucket, flat))
    }


def owned_everywhere(trainer: Trainer) -> None:
    """Give every rank the sums of gradients that other holders own."""
    recorded = trainer.links.sums
    assert isinstance(recorded, Recorded)
    for bucket in trainer.state.buckets:
        if bucket.shares:
            recorded.sums.gather(bucket.gradients_name, bucket.holders, bucket.gradients, bucket.shares)


def train(build: Build, rank: int, board: Board, trace: Trace, transport: Transport) -> dict[str, Tensor]:
    plan = build.plan
    samples = RandomSamples(plan.model.vocab, plan.train.sequence)
    trainer = Trainer(build, rank, samples, samples, board, Endpoint(transport=transport, checked=True))
    Recorded(trainer)
    count = plan.batches[0][1] // (plan.mesh.dp * plan.train.micro_batch)
    for bucket, entry, _ in trainer.state.logical(lambda bucket: bucket.parameters):
        bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    for name, bias in trainer.state.biases.items():
        bias.copy_(torch.from_numpy(weight(name, tuple(bias.shape))))
    result: dict[str, Tensor] = {}
    rows = []
    for step in range(plan.steps):
        with nothing_else(trainer, f"train_{count}"):
            sums = trainer.accumulate()
            trace.write(step + 1, trainer.program, trainer.actions)
            if step == 0:
                owned_everywhere(trainer)
                result |= logical(trainer, "gradient", "gradients")
                result |= {f"load/{name}": sums[f"load {name}"].clone() for name in trainer.loads}
            row = trainer.apply(sums)
        rows.append([row.get(k, 0.0) for k in ("loss", "mtp_loss", "sequence_loss", "grad_norm")])
    assert plan.train.validate is not None
    with nothing_else(trainer, f"evaluate_{count}", plan.train.validate.batches):
        validation = trainer.evaluate()
    result |= logical(trainer, "weight", "parameters")
    result |= {f"bias/{name}": bias.clone() for name, bias in trainer.state.biases.items()}
    result["rows"] = torch.tensor(rows, dtype=torch.float64)
    losses = [validation["validation_loss"], validation.get("validation_mtp_loss", 0.0)]
    result["validation"] = torch.tensor(losses, dtype=torch.float64)
    return result


def main(folder: Path, world: int, transport: Transport) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for path in sorted((folder / "builds").iterdir()):
            out = folder / "out" / path.name
            out.mkdir(parents=True, exist_ok=True)
            build = Build.open(path)
            result = train(build, rank, board, Trace(out, rank, 0, run_copy.program_digest(build.files)), transport)
            save_file(result, out / f"rank_{rank}.safetensors")

    outcome = launch(target, world, folder=folder, supervision=Supervision(hang_timeout_s=120))
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    chosen: Transport = "gloo" if sys.argv[3] == "gloo" else "memory"
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), chosen))
