"""The losses of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Losses:
    """Scalars of a whole global batch: `mtp` without its weight (zero without MTP), `sequence` with its α.

    loads: tokens of each expert ([E] int64) by MoE block, "layers.3", …, "mtp.0" last.
    """

    main: Tensor
    mtp: Tensor
    sequence: Tensor
    loads: dict[str, Tensor]
    index: Tensor  # of indexers, with its weight

    def total(self, mtp_weight: float) -> Tensor:
        """The sum that is minimised."""
        return self.main + mtp_weight * self.mtp + self.sequence + self.index


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Σ cross entropy / number of valid targets, over the whole batch; a target of −1 is not valid."""
    num_valid = int((targets_BS >= 0).sum())
    assert num_valid > 0, "a batch without a valid target has no loss"
    return (
        functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=-1, reduction="sum")
        / num_valid
    )


@dataclass(frozen=True)
class PolicyRecipe:
    """How a policy is trained, as a spec's `grpo` block names it; `longest`: tokens of the longest completion."""

    group: int
    temperature: float
    clip_low: float
    clip_high: float
    kl: float
    kl_form: str
    loss: str
    scale: str
    longest: int


def group_advantages(rewards_N: Tensor, recipe: PolicyRecipe) -> Tensor:
    """Rewards of completions, grouped by prompt -> advantages (arXiv 2402.03300, section 4.1.2)."""
    advantages = []
    for rewards_G in rewards_N.split(recipe.group):
        better_G = rewards_G - rewards_G.mean()
        spread = {"group": rewards_G, "batch": rewards_N}.get(recipe.scale)
        advantages.append(better_G if spread is None else better_G / (spread.std() + 1e-4))
    return torch.cat(advantages)


def policy_loss(
    logps: Sequence[Tensor],
    olds: Sequence[Tensor],
    references: Sequence[Tensor],
    advantages_N: Tensor,
    recipe: PolicyRecipe,
) -> Tensor:
    """The loss of whole completions, from the log-probabilities of their tokens: by the policy, by the
    policy that sampled them, and by the reference.

    Equation 3 of arXiv 2402.03300, with the divergence as there ("k3") or times the ratio ("corrected"), averaged as it
    says ("grpo"), over all tokens ("dapo", arXiv 2503.14476, equation 8), or over as many as there might be ("dr_grpo",
    arXiv 2503.20783).
    """
    low, high = 1 - recipe.clip_low, 1 + recipe.clip_high
    losses = []
    for logp_C, old_C, reference_C, advantage in zip(logps, olds, references, advantages_N, strict=True):
        ratio_C = logp_C.exp() / old_C.exp()
        gain_C = torch.minimum(ratio_C * advantage, ratio_C.clip(low, high) * advantage)
        rarer_C = reference_C.exp() / logp_C.exp()
        away_C = (ratio_C if recipe.kl_form == "corrected" else 1) * (rarer_C - rarer_C.log() - 1)
        losses.append(recipe.kl * away_C - gain_C)
    if recipe.loss == "grpo":
        return torch.stack([loss_C.mean() for loss_C in losses]).mean()
    tokens = len(losses) * recipe.longest if recipe.loss == "dr_grpo" else sum(map(len, losses))
    return torch.cat(losses).sum() / tokens
