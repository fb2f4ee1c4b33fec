"""A contestant: a schedule of torch.distributed.pipelining over four gloo ranks, with the layers of `transformers`.

    python -m benchmarks.speed.pipelining BUILD CORPUS --schedule dualpipev --wire READ,WRITE

One thread per rank, micro-batches of one sequence. Layers are split so that the rank with the head, which takes as long
as two layers, has fewer layers. Weights, samples and recipe are those of BUILD.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.speed.ranks import joined
from benchmarks.speed.serve import Step, serve
from benchmarks.speed.theirs_model import Optimizer, batches_of, model_of
from runtime.build.build import Build

Placement = dict[int, tuple[int, ...]]  # stages per rank

ATTENTION = "eager"  # faster than sdpa here: heads of unequal widths take sdpa's slow path
# The first layer of each stage, for a model of eight layers. The first stage has the embedding, the last the head.
ONE_EACH = (0, 1, 2, 3, 4, 5, 6, 7)
OF_TWO = (0, 3, 5, 7)
# The stages of each rank: in a V, or in a loop.
V: Placement = {rank: (rank, 7 - rank) for rank in range(4)}
LOOP: Placement = {rank: (rank, rank + 4) for rank in range(4)}
SCHEDULES: dict[str, tuple[Any, tuple[int, ...], Placement]] = {
    "dualpipev": (ScheduleDualPipeV, ONE_EACH, V),
    "interleaved1f1b": (ScheduleInterleaved1F1B, ONE_EACH, LOOP),
    "1f1b": (Schedule1F1B, OF_TWO, {rank: (rank,) for rank in range(4)}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", help="file of the FileStore by which ranks connect")
    parser.add_argument("--wire", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    info = {"threads": 1, "processes": args.ranks, "choice": {"attention": ATTENTION}}
    with joined("benchmarks.speed.pipelining", args) as rank:
        serve(args.wire, step_of(args, rank), info, rank, args.ranks)
    sys.stdout.flush()
    os._exit(0)  # the schedules do not join their threads


class Part(nn.Module):
    """The layers [first, last) of a model, with the embedding before the first and the head after the last layer."""

    def __init__(self, model: PreTrainedModel, first: int, last: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.embedding = model.model.embed_tokens if first == 0 else None
        self.layers = layers[first:last]
        self.norm = model.model.norm if last == len(layers) else None
        self.head = model.lm_head if last == len(layers) else None
        self.rotary = model.model.rotary_emb
        sequence = model.config.max_position_embeddings
        masked = torch.full((sequence, sequence), float("-inf")).triu(1)
        self.register_buffer("mask", masked[None, None], persistent=False)
        self.register_buffer("position", torch.arange(sequence)[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states of a micro-batch → hidden states or logits."""
        x_BSD = self.embedding(x) if self.embedding is not None else x
        positions = self.rotary(x_BSD, self.position)
        for layer in self.layers:
            x_BSD = layer(x_BSD, attention_mask=self.mask, position_ids=self.position, position_embeddings=positions)
        return x_BSD if self.norm is None or self.head is None else self.head(self.norm(x_BSD))


def step_of(args: argparse.Namespace, rank: int) -> Step:
    """A training step of this rank. Returns the loss, which all ranks get from the rank of the last stage."""
    plan = Build.open(args.build).plan
    batches = batches_of(plan, args.corpus)
    full_model = model_of(plan, "grouped_mm", ATTENTION)
    kind, firsts, placement = SCHEDULES[args.schedule]
    bounds = [*firsts, len(full_model.model.layers)]
    parts = {s: Part(full_model, bounds[s], bounds[s + 1]) for s in placement[rank]}
    del full_model
    optimizer = Optimizer([p for part in parts.values() for p in part.parameters()], plan, "fused")
    stages = [PipelineStage(part, s, len(firsts), torch.device("cpu")) for s, part in parts.items()]
    schedule = kind(stages if len(stages) > 1 else stages[0], batches.size, loss_fn=_loss)
    has_last = len(firsts) - 1 in parts
    steps_done = 0

    def step() -> float:
        nonlocal steps_done
        tokens, targets = batches.of_step(steps_done)
        losses: list[Tensor] = []
        inputs = (tokens,) if 0 in parts else ()
        schedule.step(*inputs, target=targets if has_last else None, losses=losses, return_outputs=False)
        optimizer.step(_summed)
        steps_done += 1
        return float(_summed(torch.stack(losses).mean().detach() if has_last else torch.zeros(())))

    return step


def _loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def _summed(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value


if __name__ == "__main__":
    sys.exit(main())
