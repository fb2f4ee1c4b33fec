"""The steps of a run that learns from rewards: completions, their rewards and advantages, and the training inputs.

Shao et al., "DeepSeekMath" (GRPO), arXiv 2402.03300; Yu et al., "DAPO", arXiv 2503.14476; Liu et al., "Understanding
R1-Zero-like training" (Dr. GRPO), arXiv 2503.20783.

N sequences of a step, `group` consecutive ones per prompt · C tokens of the longest completion · R rewards · S
positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.contract import GrpoRecipe, RunPlan
from runtime.contract.names import DataName
from runtime.data.prompts import PromptSamples
from runtime.data.rewards.scoring import Case, RewardError, Rewards
from runtime.rl.generator import CompletionLimits, Generator, RolloutError, Rollouts, all_reduce
from runtime.rl.next_tokens import SoftmaxSampler
from runtime.state.state import State
from runtime.step.micro_batches import NO_TARGET, Indices
from runtime.step.step_time import StepTime
from runtime.step.trainer import Trainer

# --- Inputs of the policy loss: the advantage of each completion, and the weight of its tokens
#
# N completions, `group` consecutive ones per prompt. Both are functions of the whole step, so they are equal on all
# ranks. The names are those of TRL's `loss_type` and `scale_rewards`.

Loss = Literal["grpo", "dapo", "dr_grpo"]
Scale = Literal["group", "batch", "none"]
Numbers = npt.NDArray[np.float64]
NO_SPREAD = 1e-4  # added to a standard deviation, as in TRL


def totals(rewards_NR: Numbers, weights_R: Numbers) -> Numbers:
    """Return the weighted sum of the rewards of each completion. Equal rewards give bit-identical sums, which a matrix
    product does not guarantee."""
    return (rewards_NR * weights_R).sum(axis=1)


def have_equal_rewards(totals_N: Numbers, group: int) -> npt.NDArray[np.bool_]:
    """Return for each group whether all completions have the same reward, so that nothing is learnt from them. A zero
    standard deviation is no test for this: that of six times 0.1 is 1e-17."""
    grouped_PG = totals_N.reshape(-1, group)
    return np.all(grouped_PG == grouped_PG[:, :1], axis=1)


def advantages(rewards_N: Numbers, group: int, scale: Scale) -> Numbers:
    """Return the advantage of each completion: its reward minus the mean of its group (arXiv 2402.03300, §4.1.2).

    It is divided by the sample standard deviation (n − 1 degrees of freedom) of the group or the batch, or not divided
    (arXiv 2503.20783). It is 0 if all rewards of the group are equal. `group` is at least 2 and divides N; rewards are
    finite.
    """
    grouped_PG = rewards_N.astype(np.float64).reshape(-1, group)
    better_PG = grouped_PG - grouped_PG.mean(axis=1, keepdims=True)
    better_PG[have_equal_rewards(rewards_N, group)] = 0  # instead of the rounding error of the mean
    if scale == "group":
        better_PG /= grouped_PG.std(axis=1, ddof=1, keepdims=True) + NO_SPREAD
    elif scale == "batch":
        better_PG /= grouped_PG.std(ddof=1) + NO_SPREAD
    return better_PG.reshape(-1)


def token_weights(lengths_N: npt.NDArray[np.int64], loss: Loss, longest: int) -> Numbers:
    """Return the weight of each completion's tokens, so that the weighted sum over all tokens of the step is the loss:
    `grpo` the mean over completions of the mean over tokens, `dapo` the mean over all tokens of the step (arXiv
    2503.14476), `dr_grpo` the sum over tokens divided by N · `longest`, the limit of a completion (arXiv 2503.20783). A
    completion without tokens counts in N.
    """
    count = len(lengths_N)
    if loss == "grpo":
        return 1.0 / (count * np.maximum(lengths_N, 1).astype(np.float64))
    tokens = max(int(lengths_N.sum()), 1) if loss == "dapo" else count * longest
    return np.full(count, 1.0 / tokens)


# --- policy

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
COUNTS = ("tokens", "different", "clipped", "kl", "reference_kl")  # of sampled tokens, over the world


class PromptDraws(Protocol):
    """Prompts by number of the draw, equal on every rank."""

    def prompt(self, index: int) -> Ids:
        """Return the token ids of a prompt."""

    def case(self, index: int, completion: Ids) -> Case:
        """Return the completion of a prompt with what rewards read."""


class Scorer(Protocol):
    """Computes the rewards of completions: [cases, rewards]."""

    def score(self, cases: Sequence[Case]) -> Floats:
        """Return the rewards, cases by rewards."""

    def close(self) -> None: ...


class Reference:
    """The initial weights of the run, in host memory. Construct it before any step is trained."""

    def __init__(self, state: State, sums: Sums) -> None:
        self._sums = sums
        self._current = [*(bucket.parameters for bucket in state.all_buckets), *state.untrained.values()]
        self._stored = [weights.to("cpu", copy=True) for weights in self._current]

    def swap(self) -> None:
        """Swap these weights with the current ones. Returns when all ranks have swapped."""
        for current, stored in zip(self._current, self._stored, strict=True):
            before = current.to("cpu", copy=True)
            current.copy_(stored)
            stored.copy_(before)
        self._sums.all_reduce(torch.zeros(1, dtype=torch.float64))


@dataclass
class ScoredRollouts:
    """The rollouts of a step with rewards and advantages. `drawn`: the numbers of their sequences."""

    drawn: Indices
    rollouts: Rollouts
    rewards_NR: Floats
    advantage_N: Floats
    weight_N: Floats  # of each token of a completion
    reference_NC: Floats | None  # log-probabilities under the reference


@dataclass
class Policy:
    """The rollouts of a run on one rank. `scorer`: on the first pipeline rank of each column, else None. `reference`:
    None without a KL penalty."""

    plan: RunPlan
    rank: int
    generator: Generator
    prompts: PromptDraws
    scorer: Scorer | None
    sums: Sums
    time: StepTime
    reference: Reference | None = None
    set_action: Callable[[str], None] = lambda _: None  # of the rank's board
    _scored: ScoredRollouts | None = None
    _generated_at: int = -1  # step
    _is_first: bool = False  # whether the weights are still those of generation
    _counted: Floats = field(default_factory=lambda: np.zeros(len(COUNTS)))

    @property
    def _grpo(self) -> GrpoRecipe:
        assert self.plan.train.grpo is not None, "the plan of a run that learns from rewards"
        return self.plan.train.grpo

    @property
    def _column(self) -> int:
        return self.rank % self.plan.mesh.columns

    @property
    def iterations(self) -> int:
        """Number of steps that train on the same completions."""
        return self._grpo.iterations

    @property
    def rollouts(self) -> Rollouts:
        """Rollouts of the last step."""
        return self._current.rollouts

    def close(self) -> None:
        """Stop the processes that compute rewards."""
        if self.scorer:
            self.scorer.close()

    # ---- rollouts

    def comes_again(self, step: int) -> bool:
        """Whether step `step` + 1 (steps count from 0) trains on the same completions."""
        return (step + 1) % self._grpo.iterations > 0

    def roll_out(self, step: int, drawn: Indices) -> None:
        """Make rollouts of the sequences `drawn` with the current weights, unless they exist already."""
        if self._scored is None or not np.array_equal(self._scored.drawn, drawn):
            self._scored, self._generated_at = self._new(drawn), step
        self._is_first = self._generated_at == step  # also if a step is recomputed

    def _new(self, drawn: Indices) -> ScoredRollouts:
        group = self._grpo.group
        prompts = [self.prompts.prompt(int(i) // group) for i in drawn]
        columns = self._of_columns(len(drawn))
        with self.time.count_block("generation"):
            rollouts = self.generator.generate(prompts, drawn.tolist(), columns.tolist())
        reference_NC = None
        if self.reference:
            with self.time.count_block("generation"):
                self.reference.swap()
                reference_NC = self.generator.log_probabilities(rollouts, columns.tolist())
                self.reference.swap()
        self.set_action("score completions")
        with self.time.count_block("reward"):
            rewards_NR = self._rewards(drawn, rollouts, columns)
        advantage_N = advantages(totals(rewards_NR, self._weights_R), group, self._grpo.scale)
        weight_N = token_weights(rollouts.lengths_N, self._grpo.loss, self._grpo.completion)
        return ScoredRollouts(drawn, rollouts, rewards_NR, advantage_N, weight_N, reference_NC)

    @property
    def _weights_R(self) -> Floats:
        return np.array([reward.weight for reward in self._grpo.rewards])

    def _of_columns(self, num: int) -> Indices:
        """Return the column of each sequence of a step."""
        return np.arange(num) // self.plan.train.micro_batch % self.plan.mesh.dp

    def _rewards(self, drawn: Indices, rollouts: Rollouts, columns: Indices) -> Floats:
        """Return the rewards of all sequences. Each column scores its own. Raises RewardError on all ranks."""
        rewards_NR, error = np.zeros((len(drawn), len(self._grpo.rewards))), None
        if self.scorer is not None:
            mine = np.flatnonzero(columns == self._column)
            try:
                rewards_NR[mine] = self.scorer.score([self._case(drawn, rollouts, int(i)) for i in mine])
            except RewardError as raised:
                error, rewards_NR[0, 0] = raised, np.nan
        all_reduce(self.sums, torch.from_numpy(rewards_NR))
        if error:
            raise error
        if np.isnan(rewards_NR).any():
            raise RewardError("another rank cannot score completions: its log says why")
        return rewards_NR

    def _case(self, drawn: Indices, rollouts: Rollouts, i: int) -> Case:
        completion = rollouts.tokens_NC[i, : rollouts.lengths_N[i]]
        return self.prompts.case(int(drawn[i]) // self._grpo.group, completion)

    # ---- inputs of training

    def micro_batches(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of this column's micro-batches, by name: [micro-batch, token]."""
        scored, S, size = self._current, self.plan.train.sequence, self.plan.train.micro_batch
        mine = np.arange(len(scored.drawn)).reshape(-1, self.plan.mesh.dp, size)[:, self._column].reshape(-1)
        tokens, targets = np.zeros((len(mine), S), np.int64), np.full((len(mine), S), NO_TARGET)
        sampled = {"old": scored.rollouts.logp_NC, "advantage": scored.advantage_N[:, None]}
        sampled |= {"weight": scored.weight_N[:, None]}
        if scored.reference_NC is not None:
            sampled["reference"] = scored.reference_NC
        of_tokens = {name: np.zeros((len(mine), S)) for name in sampled}
        real = np.zeros((len(mine), S), np.int32)  # 0: padding
        for row, i in enumerate(mine.tolist()):
            prompt, length = scored.rollouts.prompts[i], int(scored.rollouts.lengths_N[i])
            completion, first = scored.rollouts.tokens_NC[i, :length], len(prompt) - 1
            tokens[row, : first + 1 + length] = np.concatenate([prompt, completion])
            real[row, : first + 1 + length] = 1
            targets[row, first : first + length] = completion
            for name, values_NC in sampled.items():
                of_tokens[name][row, first : first + length] = values_NC[i, :length]
        dtype = torch.float64 if self.plan.precision.compute == "float64" else torch.float32
        integers = {"tokens": tokens, "targets": targets, "real": real}
        inputs = {name: torch.from_numpy(values) for name, values in integers.items()}
        inputs |= {name: torch.from_numpy(values).to(dtype) for name, values in of_tokens.items()}
        inputs |= {DataName.routes(f"L{layer}"): routes[mine] for layer, routes in scored.rollouts.routes.items()}
        return {name: value.reshape(-1, size * S, *value.shape[2:]).to(device) for name, value in inputs.items()}

    # ---- results of training

    def compare(self, reported: Mapping[int, Tensor], data: Mapping[str, Tensor]) -> None:
        """Compare the log-probabilities of the training forward with those of generation. `reported`: of the
        micro-batches whose head is on this rank. All ranks call it. RolloutError if a bit differs although the weights
        are still those of generation."""
        counted, worst = np.zeros(len(COUNTS)), ""
        for a, logp_T in reported.items():
            new, counts = self._counts(logp_T, {name: values[a] for name, values in data.items()})
            counted += np.array(counts)
            if counts[1] and not worst:
                worst = f": micro-batch {a}, by {new:.3g} nats at most"
        all_reduce(self.sums, torch.from_numpy(counted))
        self._counted = counted
        if self._is_first and counted[1]:
            raise RolloutError(
                f"{counted[1]:,.0f} of {counted[0]:,.0f} log-probabilities of generation have other bits in training"
                + worst
            )

    def _counts(self, logp_T: Tensor, data: Mapping[str, Tensor]) -> tuple[float, list[float]]:
        """Return the largest difference of log-probabilities in a micro-batch, and its COUNTS."""
        is_target = data["targets"] >= 0
        new, old, advantage = (values[is_target].double() for values in (logp_T, data["old"], data["advantage"]))
        change, low, high = new - old, 1 - self._grpo.clip_low, 1 + self._grpo.clip_high
        ratio = change.exp()
        clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
        apart = data["reference"][is_target].double() - new if "reference" in data else torch.zeros_like(new)
        largest = change.abs().max().item() if len(new) else 0.0
        counts = len(new), (new != old).sum(), clipped.sum(), _divergence(change), _divergence(apart)
        return largest, [float(count) for count in counts]

    def row(self) -> dict[str, Any]:
        """Return the metrics of a step's rollouts."""
        scored = self._current
        lengths_N = scored.rollouts.lengths_N
        tokens, _, clipped, kl, reference_kl = self._counted
        means = {reward.name: float(scored.rewards_NR[:, r].mean()) for r, reward in enumerate(self._grpo.rewards)}
        totals_N = totals(scored.rewards_NR, self._weights_R)
        return {
            "reward": float(totals_N.mean()),
            "rewards": means,
            "reward_alike": float(have_equal_rewards(totals_N, self._grpo.group).mean()),
            "completion_tokens": float(lengths_N.mean()),
            "completion_longest": float((lengths_N == self._grpo.completion).mean()),
            "entropy": float(scored.rollouts.entropy_NC.sum() / lengths_N.sum()),
            "policy_kl": kl / max(tokens, 1),
            "clipped": clipped / max(tokens, 1),
            **({"reference_kl": reference_kl / max(tokens, 1)} if scored.reference_NC is not None else {}),
        }

    @property
    def _current(self) -> ScoredRollouts:
        assert self._scored is not None, "roll_out comes before training"
        return self._scored


def _divergence(apart: Tensor) -> Tensor:
    """Return the estimate of the KL divergence, summed over tokens: exp(x) − x − 1 for differences x (Schulman,
    "Approximating KL divergence", 2020)."""
    return (apart.exp() - apart - 1).sum()


# --- Constructing the policy of a rank


def policy_of(trainer: Trainer, prompts: PromptSamples, tell_boundary: Callable[[str], None]) -> Policy:
    """Return the policy of a rank that has the initial weights of the run. Starts the processes of rewards.
    `tell_boundary`: if there are functions of the user, called with the reason why they have the rights of the run, or
    "".

    Raises RewardError or RolloutError if rewards or generation cannot start.
    """
    plan, grpo, sums = trainer.plan, trainer.plan.train.grpo, trainer.links.sums
    assert grpo is not None, "a run with prompts learns from rewards"
    program = max(
        (evaluation for name, evaluation in trainer.programs.items() if not name.trains),
        key=lambda evaluation: evaluation.micro_batches,
    )
    of_column = program.micro_batches * plan.train.micro_batch
    limits = CompletionLimits(grpo.completion, prompts.end, min(of_column, grpo.slots or of_column))
    sampler = SoftmaxSampler(plan.train.seed)
    generator = Generator(trainer.build, trainer.rank, trainer.executor, program, sums, limits, sampler)
    texts = {reward.name: trainer.build.files[reward.file].decode() for reward in grpo.rewards if reward.file}
    scorer = Rewards(grpo.rewards, texts) if trainer.pp_rank == 0 else None
    if scorer and scorer.no_boundary is not None:
        tell_boundary(scorer.no_boundary)
    reference = Reference(trainer.state, sums) if grpo.kl else None
    return Policy(
        plan,
        trainer.rank,
        generator,
        prompts,
        scorer,
        sums,
        trainer.time,
        reference,
        set_action=trainer.board.set_action,
    )
