"""Ranks that learn from rewards: `python -m tests.runtime.rl.learning FOLDER WORLD STEPS` trains every build in
FOLDER/builds on random prompts. The reward of a completion is the share of its tokens that are small.

Rank 0 writes FOLDER/out/<build>.jsonl with one line per step: its row and its completions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.data.rewards.scoring import Case
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.rl.generator import CompletionLimits, Generator
from runtime.rl.next_tokens import SoftmaxSampler
from runtime.rl.policy import Policy, Reference
from runtime.step.trainer import Trainer
from tests.runtime.step.samples import RandomSamples, weight

END = 3


@dataclass
class DrawnPrompts:
    """A few prompts, drawn in order."""

    vocab: int
    longest: int

    def prompt(self, index: int) -> npt.NDArray[np.int64]:
        random = np.random.default_rng(index % 3)
        return random.integers(0, self.vocab, 1 + index % self.longest)

    def case(self, index: int, completion: npt.NDArray[np.int64]) -> Case:
        return Case(str(index), " ".join(map(str, completion.tolist())), {})


@dataclass
class SmallTokens:
    vocab: int

    def score(self, cases: Sequence[Case]) -> npt.NDArray[np.float64]:
        shares = [np.mean([int(word) < self.vocab // 4 for word in case.completion.split()]) for case in cases]
        return np.array(shares).reshape(-1, 1)

    def close(self) -> None:
        pass


def learning(build: Build, rank: int, board: Board) -> Trainer:
    """A trainer with a policy. Its weights do not depend on the plan."""
    samples = RandomSamples(build.plan.model.vocab, build.plan.train.sequence)
    endpoint = Endpoint(transport="memory", checked=True)
    return Trainer(build, rank, samples, samples, board, endpoint, policy=_policy_of)


def _policy_of(trainer: Trainer) -> Policy:
    build, rank, plan, grpo = trainer.build, trainer.rank, trainer.plan, trainer.plan.train.grpo
    assert grpo is not None
    for bucket in trainer.state.all_buckets:
        for entry in bucket.entries:
            bucket.set_weight(entry, torch.from_numpy(weight(entry.name, entry.shape)))
    program = next(program for name, program in build.programs.items() if name.startswith("evaluate"))
    limits = CompletionLimits(grpo.completion, END, 4)
    sums = trainer.links.sums
    generator = Generator(build, rank, trainer.executor, program, sums, limits, SoftmaxSampler(plan.train.seed))
    scorer = SmallTokens(plan.model.vocab) if trainer.pp_rank == 0 else None
    reference = Reference(trainer.state, sums) if grpo.kl else None
    prompts = DrawnPrompts(plan.model.vocab, grpo.prompt)
    return Policy(plan, rank, generator, prompts, scorer, sums, trainer.time, reference)


def steps(trainer: Trainer, count: int) -> list[dict[str, Any]]:
    rows = []
    for _ in range(count):
        row = trainer.train_step()
        assert isinstance(trainer.policy, Policy)
        rows.append(row | {"completions": trainer.policy.rollouts.tokens_NC.tolist()})
    return rows


def main(folder: Path, world: int, count: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for path in sorted((folder / "builds").iterdir()):
            rows = steps(learning(Build.open(path), rank, board), count)
            if rank == 0:
                (folder / "out").mkdir(exist_ok=True)
                (folder / "out" / f"{path.name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
