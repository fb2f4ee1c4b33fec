"""What the policy loss reads of a step's completions: the advantage of each, and the weight of its tokens.

N completions, those of a prompt side by side: `group` of each. Both are functions of the whole step, so every rank
finds the same. The names are those of TRL's `loss_type` and `scale_rewards`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Loss = Literal["grpo", "dapo", "dr_grpo"]
Scale = Literal["group", "batch", "none"]
Numbers = npt.NDArray[np.float64]

NO_SPREAD = 1e-4  # added to a deviation, as TRL does


def totals(rewards_NR: Numbers, weights_R: Numbers) -> Numbers:
    """The weighted sum of the rewards of each completion; equal rewards have a sum of the same bits, which a product
    of matrices does not promise."""
    return (rewards_NR * weights_R).sum(axis=1)


def alike(totals_N: Numbers, group: int) -> npt.NDArray[np.bool_]:
    """[groups]: whether all completions of a prompt have the same reward, so that nothing is learnt from them. The
    deviation of equal numbers is no measure of it: that of six times 0.1 is 1e-17."""
    grouped_PG = totals_N.reshape(-1, group)
    return np.all(grouped_PG == grouped_PG[:, :1], axis=1)


def advantages(rewards_N: Numbers, group: int, scale: Scale) -> Numbers:
    """Rewards -> how much better each completion is than the mean of its group (arXiv 2402.03300, §4.1.2).

    Divided by the deviation of the rewards of the group or of all (of samples: of n − 1 degrees of freedom), or, as
    arXiv 2503.20783 has it, by nothing. They are 0 where all rewards of the group are equal. `group` is 2 at least and
    divides N; rewards are finite.
    """
    grouped_PG = rewards_N.astype(np.float64).reshape(-1, group)
    better_PG = grouped_PG - grouped_PG.mean(axis=1, keepdims=True)
    better_PG[alike(rewards_N, group)] = 0  # not what the rounding of the mean leaves
    if scale == "group":
        better_PG /= grouped_PG.std(axis=1, ddof=1, keepdims=True) + NO_SPREAD
    elif scale == "batch":
        better_PG /= grouped_PG.std(ddof=1) + NO_SPREAD
    return better_PG.reshape(-1)


def token_weights(lengths_N: npt.NDArray[np.int64], loss: Loss, longest: int) -> Numbers:
    """Tokens of each completion -> the weight of every token of it, so that the weighted sum over all tokens of the
    step is the loss: `grpo` the mean over completions of the mean over tokens, `dapo` the mean over all tokens of the
    step (arXiv 2503.14476), `dr_grpo` the sum over tokens, divided by N completions of the `longest` length there may
    be (arXiv 2503.20783). A completion without tokens counts in N.
    """
    count = len(lengths_N)
    if loss == "grpo":
        return 1.0 / (count * np.maximum(lengths_N, 1).astype(np.float64))
    tokens = max(int(lengths_N.sum()), 1) if loss == "dapo" else count * longest
    return np.full(count, 1.0 / tokens)
