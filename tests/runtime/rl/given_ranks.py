"""Ranks that train on fixed completions: `python -m tests.runtime.rl.given_ranks FOLDER WORLD` trains every build in
FOLDER/builds on those in FOLDER/given/<build>.

Each rank writes FOLDER/out/<build>/rank_<r>.safetensors: as in tests/runtime/step/ranks.py, gradients after the first
backward, weights and biases after the last step, and losses and norms of all steps; and the log-probabilities of the
first forward for the tokens of each micro-batch whose head it has, concatenated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.build.build import Build
from runtime.comm.connect import Endpoint
from runtime.launch.heartbeat import Board
from runtime.launch.launcher import launch
from runtime.rl.policy import Policy
from runtime.step.trainer import Trainer
from tests.runtime.rl.given import Replay
from tests.runtime.step.ranks import give_weights, logical, owned_everywhere
from tests.runtime.step.recorded import Recorded
from tests.runtime.step.samples import RandomSamples


class Stale(Policy):
    """A policy whose completions were sampled with other weights, so that no log-probabilities are bit-identical."""

    reported: Mapping[str, Tensor] = {}

    def compare(self, reported: Mapping[int, Tensor], data: Mapping[str, Tensor]) -> None:
        self._is_first = False
        super().compare(reported, data)
        if not self.reported:
            self.reported = {f"logp/{a}": logp_T[data["targets"][a] >= 0] for a, logp_T in reported.items()}


def policy_of(trainer: Trainer, folder: Path) -> Stale:
    plan, rank, grpo = trainer.plan, trainer.rank, trainer.plan.train.grpo
    assert grpo is not None
    replay = Replay(folder, plan.batches[0][1], grpo.group)
    scorer, reference = (replay if needed else None for needed in (trainer.pp_rank == 0, grpo.kl > 0))
    return Stale(plan, rank, replay, replay, scorer, trainer.links.sums, trainer.time, reference)  # type: ignore[arg-type]


def train(build: Build, rank: int, board: Board, given: Path) -> dict[str, Tensor]:
    plan = build.plan
    samples = RandomSamples(plan.model.vocab, plan.train.sequence)
    endpoint = Endpoint(transport="memory", checked=True)
    trainer = Trainer(build, rank, samples, None, board, endpoint, policy=partial(policy_of, folder=given))
    Recorded(trainer)
    give_weights(trainer)
    policy = trainer.policy
    assert isinstance(policy, Stale)
    result: dict[str, Tensor] = {}
    rows = []
    for step in range(plan.steps):
        sums = trainer.accumulate()
        if step == 0:
            owned_everywhere(trainer)
            result |= logical(trainer, "gradient", "gradients") | policy.reported
            result |= {f"load/{name}": sums[f"load {name}"].clone() for name in trainer.loads}
        row = trainer.apply(sums)
        rows.append([row.get(k, 0.0) for k in ("loss", "mtp_loss", "sequence_loss", "grad_norm")])
    result |= logical(trainer, "weight", "parameters")
    result |= {f"bias/{name}": bias.clone() for name, bias in trainer.state.biases.items()}
    return result | {"rows": torch.tensor(rows, dtype=torch.float64)}


def main(folder: Path, world: int) -> int:
    def target(rank: int, world: int, board: Board) -> None:
        for path in sorted((folder / "builds").iterdir()):
            output = folder / "out" / path.name
            output.mkdir(parents=True, exist_ok=True)
            result = train(Build.open(path), rank, board, folder / "given" / path.name)
            save_file(result, output / f"rank_{rank}.safetensors")

    outcome = launch(target, world, folder=folder)
    print(outcome)
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
