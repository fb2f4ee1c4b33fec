"""A rank of torch's pipeline runtime: loads the CSV of a schedule, runs a step, and writes its gradients.

python -m tests.compiler.tools.exchange.pipeline_worker CSV STORE RANK RANKS STAGES MICRO_BATCHES V|LOOP OUT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH, ROWS = 6, 2  # of a model, and of a micro-batch


def layers(stages: int) -> list[nn.Module]:
    """The stages of a model, with the same weights in every process."""
    torch.manual_seed(7)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(stages)]


def batch(micro_batches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step."""
    torch.manual_seed(11)
    shape = (micro_batches * ROWS, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """A sum, so that a step's loss is the sum of its micro-batches'."""
    return ((y - target) ** 2).sum()


def main(csv: str, store: str, rank: int, ranks: int, stages: int, micro_batches: int, kind: str, out: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    model, device = layers(stages), torch.device("cpu")
    own_stages = (rank, stages - 1 - rank) if kind == "V" else tuple(range(rank, stages, ranks))
    pipeline_stages = [PipelineStage(model[stage], stage, stages, device) for stage in own_stages]
    schedule = _PipelineScheduleRuntime(pipeline_stages, micro_batches, loss_fn=loss_of, scale_grads=False)
    schedule._load_csv(csv)
    x, target = batch(micro_batches)
    schedule.step(*((x,) if 0 in own_stages else ()), **({"target": target} if stages - 1 in own_stages else {}))
    gradients = {f"{s}.{n}": p.grad for s in own_stages for n, p in model[s].named_parameters() if p.grad is not None}
    save_file(gradients, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    csv, store, *sizes, kind, out = sys.argv[1:]
    main(csv, store, *map(int, sizes), kind=kind, out=out)  # type: ignore[misc]
