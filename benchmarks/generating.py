"""How fast models write on one core, beside what memory allows, and how long a round of rollouts takes.

    python -m benchmarks.generating [--tokens 64] [--rounds 5] [--out benchmarks/results/generating.txt]

A token reads every weight that its forward multiplies once. The bound is the rate at which one core reads memory; the
quickstart's weights fit into the caches, which are faster. Weights are random. Numbers are the best of all rounds, by
processor time; a round of rollouts is the best step of two ranks, whose cores should be otherwise idle.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it

import numpy as np
import torch

from compiler.emit.folder import write_build
from compiler.pipeline import compile_spec
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import tensors
from compiler.tools.inference.generation import Sampler, generate_tokens
from compiler.tools.inference.language_model import LanguageModel, spec_for_one_rank
from dsl.load import load
from dsl.schema import Moe, Spec
from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.rl.generator import CompletionLimits, Generator
from runtime.rl.next_tokens import SoftmaxSampler
from runtime.step.trainer import Trainer

ROOT = Path(__file__).parents[1]
MODELS = {  # name → spec, dtype
    "quickstart": (ROOT / "specs" / "quickstart.dsc", "fp32"),
    "1.2B, dense": (ROOT / "benchmarks" / "generating.dsc", "bf16"),
}
ROLLOUTS = f"{ROOT / 'specs' / 'r1-tiny.dsc'}:r1"
PROMPT = 8  # tokens
READ = 250_000_000  # FP32 numbers, to measure memory
NO_END = -1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the table to a file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rate = read_bytes_s(args.rounds)
    lines = [f"{platform.machine()}, torch {torch.__version__}; one core reads {rate / 1e9:.1f} GB/s of memory", ""]
    lines.append(f"{'':14}{'weights read':>14}{'bound':>10}{'tokens/s':>10}{'share':>8}")
    for name, (path, dtype) in MODELS.items():
        model = random_model(spec_for_one_rank(load(path), dtype))
        size = read_bytes(model)
        speed = max(written_s(model, args.tokens) for _ in range(args.rounds))
        lines.append(f"{name:14}{size / 1e6:11,.1f} MB{rate / size:10,.1f}{speed:10,.1f}{speed * size / rate:8.0%}")
        print(lines[-1], flush=True)
    lines += ["", *rollout_lines(args.rounds)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text, "utf-8")
    return 0


def read_bytes_s(rounds: int) -> float:
    """Bytes that one core reads from memory in a second of processor time."""
    x, y = torch.ones(2, READ // 2)
    return max(2 * x.nbytes / _processor_s(lambda: torch.dot(x, y)) for _ in range(rounds))


def _processor_s(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


# ---------------------------------------------------------------- generation


def random_model(spec: Spec) -> LanguageModel:
    """A model with random weights."""
    dtype = DTYPES[spec.precision.name]
    weights = {}
    for row in tensors(spec, model_steps(spec)):
        shape = row.shape if row.num_experts is None else (row.num_experts, *row.shape)
        weight = torch.ones(shape) if len(row.shape) == 1 else torch.randn(shape).mul_(spec.model.init_std)
        weights[row.name] = torch.zeros(shape) if row.role == "bias" else weight.to(dtype)
    return LanguageModel(spec, weights)


def read_bytes(model: LanguageModel) -> int:
    """Bytes of the weights that the forward of one token reads, without the MTP block: of routed experts those that are
    chosen, of the embedding one row."""
    spec, total = model.spec, 0
    for row in tensors(spec, model_steps(spec)):
        numbers = math.prod(row.shape)
        if row.num_experts is not None:
            numbers *= next(layer.ffn.top_k for layer in spec.model.layers if isinstance(layer.ffn, Moe))
        if row.name == "embedding" and not spec.model.tied:
            numbers = row.shape[1]
        total += 0 if row.name.startswith("mtp") else numbers * DTYPES[spec.precision.name].itemsize
    return total


def written_s(model: LanguageModel, num: int) -> float:
    """Tokens that a model writes in a second of processor time, after the first ones."""
    tokens = generate_tokens(model, list(range(PROMPT)), Sampler())
    list(itertools.islice(tokens, 4))
    return num / _processor_s(lambda: list(itertools.islice(tokens, num)))


# ---------------------------------------------------------------- rollouts


def rollout_lines(rounds: int) -> list[str]:
    """How long a round of rollouts takes, on the ranks of a run that learns from rewards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = load(ROLLOUTS)
        spec = spec.model_copy(update={"train": spec.train.model_copy(update={"initial": None})})
        write_build(folder / "build", compile_spec(spec).files)
        world = Build.open(folder / "build").plan.mesh.world

        def target(rank: int, world: int, board: Board) -> None:
            times = rollout_times(Build.open(folder / "build"), rank, board, rounds)
            (folder / f"rank_{rank}.json").write_text(json.dumps(times), "utf-8")

        outcome = launch(target, world, folder=folder)
        assert outcome.exit_code == 0, str(outcome)
        wall_ms, processor_ms, slots = json.loads((folder / "rank_0.json").read_text("utf-8"))
    return [
        f"r1-tiny, {slots} sequences on each of {world} ranks:"
        f" {wall_ms:.2f} ms a round, {processor_ms:.2f} ms of a rank's processor"
    ]


def rollout_times(build: Build, rank: int, board: Board, rounds: int) -> tuple[float, float, int]:
    """Milliseconds of a round, those of the processor, and the sequences of a rank."""
    plan = build.plan
    trainer = Trainer(build, rank, None, None, board, Endpoint(transport="memory"))
    program = next(program for name, program in build.programs.items() if not name.trains)
    grpo = plan.train.grpo
    assert grpo is not None
    num = plan.batches[0][1]
    limits = CompletionLimits(grpo.completion, NO_END, num // plan.mesh.dp)
    generator = Generator(
        build, rank, trainer.executor, program, trainer.links.sums, limits, SoftmaxSampler(plan.train.seed)
    )
    prompts = [np.arange(PROMPT) % plan.model.vocab] * num
    columns = (np.arange(num) // plan.train.micro_batch % plan.mesh.dp).tolist()
    best = [float("inf")] * 2
    for _ in range(rounds):
        begin = time.perf_counter(), time.process_time()
        rollouts = generator.generate(prompts, range(num), columns)
        took = time.perf_counter() - begin[0], time.process_time() - begin[1]
        best = [min(before, 1e3 * s / rollouts.rounds) for before, s in zip(best, took, strict=True)]
    return best[0], best[1], limits.slots


if __name__ == "__main__":
    sys.exit(main())
