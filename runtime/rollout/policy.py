"""The steps of a run that learns from rewards: completions, their rewards and advantages, and what training reads.

Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300; Yu et al., "DAPO", arXiv 2503.14476; Liu et al., "Understanding
R1-Zero-like training" (Dr. GRPO), arXiv 2503.20783.

N sequences of a step, `group` of each prompt, one after the other · S positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.contract import Grpo, Plan
from runtime.micro_batches import NO_TARGET, Indices
from runtime.policy_weights import advantages, token_weights
from runtime.rewards.scoring import Case
from runtime.rollout.generator import Generator, RolloutError, Rollouts, all_reduce

Floats = npt.NDArray[np.float64]


class Prompts(Protocol):
    """Prompts by the number of their draw, the same for every rank count."""

    def prompt(self, index: int) -> npt.NDArray[np.int64]: ...

    def case(self, index: int, completion: npt.NDArray[np.int64]) -> Case: ...


class Scorer(Protocol):
    """What gives completions their rewards."""

    def score(self, cases: Sequence[Case]) -> Floats: ...


@dataclass
class Scored:
    """The rollouts of a step with what they earned. `first`: the number of the first sequence."""

    first: int
    rollouts: Rollouts
    rewards_NR: Floats
    advantage_N: Floats
    weight_N: Floats  # of each token of a completion


class Policy:
    """The rollouts of one rank, as all ranks have them. `scorer`: on the first pipeline rank of each column."""

    def __init__(self, plan: Plan, rank: int, generator: Generator, sums: Sums, prompts: Prompts, scorer: Scorer) -> None:
        assert plan.train.grpo is not None
        self._plan, self._grpo, self._sums = plan, plan.train.grpo, sums
        self._pp_rank, self._column = divmod(rank, plan.mesh.columns)
        self._generator, self._prompts, self._scorer = generator, prompts, scorer
        self._scored: Scored | None = None
        self._is_first = False  # whether the weights are those that generated
        self._counted = np.zeros(len(COUNTS))

    @property
    def grpo(self) -> Grpo:
        return self._grpo

    # ---- rollouts

    def roll_out(self, drawn: Indices) -> None:
        """Have the rollouts of the sequences `drawn`: those that are there, or new ones by the weights as they are."""
        self._is_first = self._scored is None or self._scored.first != int(drawn[0])
        if not self._is_first:
            return
        group = self._grpo.group
        prompts = [self._prompts.prompt(int(i)) for i in drawn[::group] // group]
        given = [prompts[i // group] for i in range(len(drawn))]
        columns = self._of_columns(len(drawn))
        rollouts = self._generator.generate(given, drawn.tolist(), columns.tolist())
        rewards_NR = self._rewards(drawn, rollouts, columns)
        totals_N = rewards_NR @ np.array([each.weight for each in self._grpo.rewards])
        advantage_N = advantages(totals_N, group, self._grpo.scale)
        weight_N = token_weights(rollouts.lengths_N, self._grpo.loss, self._grpo.completion)
        self._scored = Scored(int(drawn[0]), rollouts, rewards_NR, advantage_N, weight_N)

    def _of_columns(self, num: int) -> npt.NDArray[np.int64]:
        """The column that has each sequence."""
        size, ranks = self._plan.train.micro_batch, self._plan.mesh.dp
        return np.arange(num) // size % ranks

    def _rewards(self, drawn: Indices, rollouts: Rollouts, columns: npt.NDArray[np.int64]) -> Floats:
        """The rewards of all sequences: each column scores its own."""
        rewards_NR = np.zeros((len(drawn), len(self._grpo.rewards)))
        if self._pp_rank == 0:
            mine = np.flatnonzero(columns == self._column)
            tokens = (rollouts.tokens_NC[i, : rollouts.lengths_N[i]] for i in mine)
            cases = [self._prompts.case(int(drawn[i]) // self._grpo.group, t) for i, t in zip(mine, tokens, strict=True)]
            rewards_NR[mine] = self._scorer.score(cases)
        all_reduce(self._sums, torch.from_numpy(rewards_NR))
        return rewards_NR

    # ---- what training reads

    @property
    def scored(self) -> Scored:
        assert self._scored is not None, "rollouts come before training"
        return self._scored

    def micro_batches(self, device: torch.device) -> dict[str, Tensor]:
        """What the micro-batches of this column read, by name: [micro-batch, token]."""
        made, S = self.scored, self._plan.train.sequence
        size, num = self._plan.train.micro_batch, len(made.advantage_N)
        mine = np.arange(num).reshape(-1, self._plan.mesh.dp, size)[:, self._column].reshape(-1)
        tokens, targets = np.zeros((len(mine), S), np.int64), np.full((len(mine), S), NO_TARGET)
        old, advantage, weight = (np.zeros((len(mine), S)) for _ in range(3))
        for row, i in enumerate(mine):
            prompt, length = made.rollouts.prompts[i], int(made.rollouts.lengths_N[i])
            completion = made.rollouts.tokens_NC[i, :length]
            tokens[row, : len(prompt) + length] = np.concatenate([prompt, completion])
            predicting = slice(len(prompt) - 1, len(prompt) - 1 + length)
            targets[row, predicting] = completion
            old[row, predicting] = made.rollouts.logp_NC[i, :length]
            advantage[row, predicting], weight[row, predicting] = made.advantage_N[i], made.weight_N[i]
        whole = {"tokens": tokens, "targets": targets}
        real = {"old": old, "advantage": advantage, "weight": weight}
        dtype = torch.float64 if self._plan.precision.compute == "float64" else torch.float32
        found = {name: torch.from_numpy(each) for name, each in whole.items()}
        found |= {name: torch.from_numpy(each).to(dtype) for name, each in real.items()}
        return {name: each.view(-1, size * S).to(device) for name, each in found.items()}

    # ---- what training says

    def compare(self, told: Mapping[int, Tensor], data: Mapping[str, Tensor]) -> None:
        """Compare the log-probabilities of the forward of training with those of generation. `told`: of the
        micro-batches whose head is here. All ranks call it. RolloutError where the weights are those that generated
        and a bit differs."""
        counted, worst = np.zeros(len(COUNTS)), ""
        for a, logp_T in told.items():
            is_target = data["targets"][a] >= 0
            new, old, advantage = (x[is_target].double() for x in (logp_T, data["old"][a], data["advantage"][a]))
            change = new - old
            ratio = change.exp()
            low, high = 1 - self._grpo.clip_low, 1 + self._grpo.clip_high
            clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
            counted += [len(new), int((new != old).sum()), int(clipped.sum()), float((ratio - 1 - change).sum())]
            if len(new) and (difference := change.abs().max().item()) and not worst:
                worst = f"micro-batch {a}, by {difference:.3g} nats"
        all_reduce(self._sums, torch.from_numpy(counted))
        self._counted = counted
        if self._is_first and counted[1]:
            raise RolloutError(
                f"{counted[1]:,.0f} of {counted[0]:,.0f} log-probabilities of generation differ from those of training"
                + (f": {worst}" if worst else "")
            )

    def row(self) -> dict[str, Any]:
        """What the row of a step says of its rollouts."""
        made, grpo = self.scored, self._grpo
        lengths_N = made.rollouts.lengths_N
        tokens, _, clipped, kl = self._counted
        by_name = {f"reward_{each.name}": float(made.rewards_NR[:, r].mean()) for r, each in enumerate(grpo.rewards)}
        weights = np.array([each.weight for each in grpo.rewards])
        whole = lengths_N == grpo.completion
        return {
            "reward": float((made.rewards_NR @ weights).mean()),
            **(by_name if len(by_name) > 1 else {}),
            "completion_tokens": float(lengths_N.mean()),
            "longest_completions": float(whole.mean()),
            "entropy": float(made.rollouts.entropy_NC.sum() / lengths_N.sum()),
            "policy_kl": kl / max(tokens, 1),
            "clipped": clipped / max(tokens, 1),
        }


COUNTS = ("tokens", "different", "clipped", "kl")  # of the tokens of completions, over the world
