"""Ranks that generate: `python -m tests.runtime.rl.ranks FOLDER WORLD SLOTS` generates with every build in
FOLDER/builds, and then computes whole sequences with the emitted forward.

Each rank writes FOLDER/out/<build>/rank_<r>.safetensors: `tokens`, `logp` and `entropy` of generation, which all ranks
have, and `whole`: its log-probabilities of the same tokens from the forward of whole sequences, with zeros for those
of other ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.ops import OPS
from runtime.rl.generator import CompletionLimits, Generator, Rollouts, log_probabilities
from runtime.rl.next_tokens import SoftmaxSampler, replace_ops
from runtime.step.executor import StepBatch
from runtime.step.trainer import Trainer
from tests.runtime.step.ranks import give_weights
from tests.runtime.step.samples import RandomSamples

END, SEED, FIRST = 3, 7, 100  # FIRST: the number of the first sequence


def prompts(vocab: int, sequence: int, num: int) -> list[np.ndarray]:
    """Prompts of one token up to almost half a sequence."""
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, 1 + i % (sequence // 2 - 1)) for i in range(num)]


def whole(trainer: Trainer, rollouts: Rollouts, mine: np.ndarray, program: str) -> Tensor:
    """The log-probabilities of all tokens of completions, from the forward of whole sequences. `mine`: the sequences of
    each micro-batch."""
    build, S = trainer.plan, trainer.sequence
    logits, lane = dict[int, Tensor](), [0]

    def take(logits_TV: Tensor, *_: Any) -> tuple[Tensor, ...]:
        logits[lane[0]] = logits_TV
        return (logits_TV.new_zeros(()),) * 2

    module = trainer.build.import_changed_module(
        f"stages.rank_{trainer.pp_rank}", lambda segment: replace_ops(segment, {id(OPS["cross_entropy"]): take})
    )

    def beginning(body: Callable[..., None]) -> Callable[..., None]:
        def begin(c: Any, p: Any, g: Any, a: int) -> None:
            lane[0] = a
            body(c, p, g, a)

        return begin

    bodies = {name: beginning(body) for name, body in module.BODIES.items()}
    rows = torch.zeros((len(mine), build.train.micro_batch * S), dtype=torch.int64)
    for a, sequences in enumerate(mine):
        for j, i in enumerate(sequences):
            text = np.concatenate([rollouts.prompts[i], rollouts.tokens_NC[i, : rollouts.lengths_N[i]]])
            rows[a, j * S : j * S + len(text)] = torch.from_numpy(text)
    batch = StepBatch({"tokens": rows, "targets": torch.zeros_like(rows)})
    with torch.no_grad():
        trainer.executor.execute(bodies, trainer.programs[program].ranks[trainer.pp_rank], batch)
    logp_NC = np.zeros_like(rollouts.logp_NC)
    for a, logits_TV in logits.items():
        for j, i in enumerate(mine[a]):
            first, length = j * S + len(rollouts.prompts[i]) - 1, rollouts.lengths_N[i]
            tokens = torch.from_numpy(rollouts.tokens_NC[i, :length])
            logp_NC[i, :length] = log_probabilities(logits_TV[first : first + length], tokens).double().numpy()
    return torch.from_numpy(logp_NC)


def generate(build: Build, rank: int, board: Board, slots: int) -> dict[str, Tensor]:
    plan, mesh = build.plan, build.plan.mesh
    samples = RandomSamples(plan.model.vocab, plan.train.sequence)
    trainer = Trainer(build, rank, samples, samples, board, Endpoint(transport="memory", checked=True))
    give_weights(trainer)
    program = next(name for name in build.programs if name.startswith("evaluate"))
    size, lanes = plan.train.micro_batch, build.programs[program].micro_batches
    num = lanes * mesh.dp * size
    of_column = np.arange(num).reshape(lanes, mesh.dp, size)
    columns = np.broadcast_to(np.arange(mesh.dp)[:, None], of_column.shape).reshape(-1)
    limits = CompletionLimits(plan.train.sequence // 2, END, slots or lanes * size)
    generator = Generator(
        build, rank, trainer.executor, build.programs[program], trainer.links.sums, limits, SoftmaxSampler(SEED)
    )
    prompt_rows = prompts(plan.model.vocab, plan.train.sequence, num)
    rollouts = generator.generate(prompt_rows, range(FIRST, FIRST + num), columns.tolist())
    again = generator.generate(prompt_rows, range(FIRST, FIRST + num), columns.tolist())
    assert (again.tokens_NC == rollouts.tokens_NC).all() and (again.logp_NC == rollouts.logp_NC).all()
    return {
        "tokens": torch.from_numpy(rollouts.tokens_NC),
        "logp": torch.from_numpy(rollouts.logp_NC),
        "entropy": torch.from_numpy(rollouts.entropy_NC),
        "rounds": torch.tensor(rollouts.rounds),
        "whole": whole(trainer, rollouts, of_column[:, trainer.column], program),
    }


def main(folder: Path, world: int, slots: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for path in sorted((folder / "builds").iterdir()):
            output = folder / "out" / path.name
            output.mkdir(parents=True, exist_ok=True)
            save_file(generate(Build.open(path), rank, board, slots), output / f"rank_{rank}.safetensors")

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
