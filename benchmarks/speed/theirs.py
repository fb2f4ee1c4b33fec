"""A contestant: DeepSeek-V3 of `transformers` or in plain PyTorch, in one process or with data parallelism.

    python -m benchmarks.speed.theirs BUILD CORPUS --threads 2 --experts grouped_mm [--compile] --wire READ,WRITE
    python -m benchmarks.speed.theirs BUILD CORPUS --threads 2 --experts plain [--compile] --wire READ,WRITE

Options that a user may choose (attention, splitting the batch, kind of AdamW) are tried in a separate process before,
and the fastest are taken. Weights, samples and recipe are those of BUILD.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.speed.ranks import joined
from benchmarks.speed.serve import Step, die_with_parent, serve
from benchmarks.speed.theirs_model import Choice, Optimizer, batches_of, loss_of, model_of, plain_of
from runtime.build.build import Build

TRIALS = ({"attention": "eager"}, {"split": 2}, {"optimizer": "foreach"})  # each compared with the best so far
TRIAL_STEPS = 2


def main() -> int:
    args = _parser().parse_args()
    torch.set_num_threads(args.threads)
    if args.try_choices:
        print(json.dumps(asdict(_fastest(args))))
        return 0
    choice = Choice(**json.loads(args.choice or _tried(sys.orig_argv)))
    info = {"threads": args.threads, "processes": args.ranks, "choice": asdict(choice)}
    with joined("benchmarks.speed.theirs", args, choice=json.dumps(asdict(choice))) as rank:
        serve(args.wire, step_of(args, choice, rank), info, rank, args.ranks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--ranks", type=int, default=1, help="processes, data parallel")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", help="file of the FileStore by which ranks connect")
    parser.add_argument("--precision", choices=("fp32", "autocast", "bf16"), default="fp32")
    parser.add_argument(
        "--experts",
        choices=("eager", "grouped_mm", "plain"),
        default="grouped_mm",
        help="of `transformers`; or plain: the model of plain_model.py",
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--choice", help="attention, split and optimizer, as JSON; default: the fastest")
    parser.add_argument("--try-choices", action="store_true", help="only find the fastest choice")
    parser.add_argument("--wire", default="")
    return parser


# ---------------------------------------------------------------- one step


def step_of(args: argparse.Namespace, choice: Choice, rank: int = 0) -> Step:
    """A training step on the whole batch, or on this rank's part of it, from the initial weights."""
    plan = Build.open(args.build).plan
    batches = batches_of(plan, args.corpus)
    model: nn.Module
    if args.experts == "plain":
        model = plain_of(plan, choice.attention)
    else:
        model = model_of(plan, args.experts, choice.attention)
    if args.precision == "bf16":
        model.bfloat16()
    optimizer = Optimizer(model.parameters(), plan, choice.optimizer)
    network: nn.Module = nn.parallel.DistributedDataParallel(model) if args.ranks > 1 else model
    loss_of_part: Callable[[Tensor, Tensor], Tensor] = loss_of(network)
    if args.compile:
        loss_of_part = torch.compile(loss_of_part, dynamic=False)
    cast = torch.autocast("cpu", torch.bfloat16) if args.precision == "autocast" else nullcontext()
    steps_done = 0

    def step() -> float:
        nonlocal steps_done
        tokens, targets = (batch.chunk(args.ranks)[rank] for batch in batches.of_step(steps_done))
        total = 0.0
        for part, part_targets in zip(tokens.chunk(choice.split), targets.chunk(choice.split), strict=True):
            with cast:
                loss = loss_of_part(part, part_targets) / choice.split
            loss.backward()
            total += loss.item()
        optimizer.step()
        steps_done += 1
        return total if args.ranks == 1 else _mean(total)

    return step


def _mean(loss: float) -> float:
    value = torch.tensor(loss)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


# ---------------------------------------------------------------- the fastest choice


def _tried(command: Sequence[str]) -> str:
    """Find the fastest choice in a separate process, so that nothing of the trials is left in this one."""
    command = [*command, "--try-choices"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=die_with_parent)
    return done.stdout.splitlines()[-1]


def _fastest(args: argparse.Namespace) -> Choice:
    """The choice with the shortest steps, one key after the other; with several ranks, tried on one rank."""
    args.ranks = 1
    best = Choice()
    best_s = _shortest_s(step_of(args, best))
    for change in TRIALS:
        variant = replace(best, **change)
        if (variant_s := _shortest_s(step_of(args, variant))) < best_s:
            best, best_s = variant, variant_s
    return best


def _shortest_s(step: Step) -> float:
    seconds = []
    for _ in range(1 + TRIAL_STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no process pool besides the contestant
    sys.exit(main())
