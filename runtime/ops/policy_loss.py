"""The clipped policy loss of sampled tokens, summed over the valid targets: those ≥ 0. T tokens, V vocabulary.

PPO's surrogate as used by GRPO (Schulman et al., arXiv 1707.06347; Shao et al., arXiv 2402.03300): with r the ratio of
a token's probability to the probability it was sampled with, and A its advantage,

    loss = Σ_t weight · (−min(r·A, clip(r, 1 − low, 1 + high)·A) + kl·c·(exp(d) − d − 1)),  d = reference − logp

where logp is the token's log-probability, and `reference` its log-probability in the reference model. With c = 1 the
gradient of the last term, on tokens that the policy sampled, is that of KL(reference ‖ policy). If `corrected`, c = r,
and the gradient is that of KL(policy ‖ reference) (DeepSeek-AI, arXiv 2512.02556, §3.1). Per-token numbers are FP64, so
that the only rounding that matters is that of logp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.cross_entropy import cross_entropy_part, cross_entropy_part_dgrad, logits_at_targets
from runtime.ops.product import wide


def policy_loss(
    logits_TV: Tensor,
    targets_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    reference_T: Tensor | None,
    low: float,
    high: float,
    kl: float,
    corrected: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits_TV, targets_T (int64), and per token its log-probability when sampled, its advantage, its weight in the
    loss and, if `kl` is not 0, its logp in the reference model -> loss [], logp_T (0 for targets < 0), and lse_T =
    log Σ_v exp(logits), all at least FP32. logp is bit-identical to the negated cross entropy of its row."""
    lse_T, picked_T = cross_entropy_part(logits_TV, targets_T)
    logp_T = (picked_T - lse_T).masked_fill_(targets_T < 0, 0)
    ratio_T, clipped_T = _ratios(logp_T, old_T, low, high)
    advantage_T = advantage_T.double()
    loss_T = -torch.minimum(ratio_T * advantage_T, clipped_T * advantage_T)
    if reference_T is not None:
        away_T = reference_T.double() - logp_T
        loss_T += kl * (ratio_T if corrected else 1.0) * (torch.expm1(away_T) - away_T)
    loss = (loss_T * weight_T).masked_fill_(targets_T < 0, 0).sum()
    return loss.to(lse_T.dtype), logp_T, lse_T


def policy_loss_dgrad(
    dloss: Tensor,
    logits_TV: Tensor,
    targets_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    reference_T: Tensor | None,
    low: float,
    high: float,
    kl: float,
    corrected: bool,
    lse_T: Tensor,
) -> Tensor:
    """dloss [], the arguments of `policy_loss`, its lse_T -> dlogits_TV = dloss·dlogp·(onehot − softmax), 0 in rows
    whose target is < 0. dlogp is the derivative of the loss with respect to logp; where both arguments of the minimum
    are equal, that of the first."""
    logp_T = wide(logits_at_targets(logits_TV, targets_T)) - lse_T
    ratio_T, clipped_T = _ratios(logp_T, old_T, low, high)
    advantage_T = advantage_T.double()
    is_clipped_T = clipped_T * advantage_T < ratio_T * advantage_T
    dlogp_T = -(ratio_T * advantage_T).masked_fill_(is_clipped_T, 0)
    if reference_T is not None:
        away_T = reference_T.double() - logp_T
        dlogp_T -= kl * (ratio_T * away_T if corrected else torch.expm1(away_T))
    dlogp_T = (dlogp_T * weight_T * dloss).masked_fill_(targets_T < 0, 0).to(lse_T.dtype)
    return cross_entropy_part_dgrad(-dlogp_T, dlogp_T, logits_TV, targets_T, lse_T)


def _ratios(logp_T: Tensor, old_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return each token's ratio of probability to sampling probability, and the clipped ratio, in FP64."""
    ratio_T = (logp_T.double() - old_T).exp()
    return ratio_T, ratio_T.clamp(1 - low, 1 + high)


OPS = (policy_loss, policy_loss_dgrad)
