"""Losses of the head in plain torch, for autograd: a part of the table in plain.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return functional.cross_entropy(logits_TV, targets_T, ignore_index=-1, reduction="sum")


def cross_entropy_part(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row."""
    pairs = zip(logits_TV, targets_T, strict=True)
    picked = [row_V[int(target)] if target >= 0 else 0 * row_V[0] for row_V, target in pairs]
    return torch.logsumexp(logits_TV, dim=1), torch.stack(picked)


def place_parts(lse_T: Tensor, picked_T: Tensor, rank: Tensor, ranks: int) -> Tensor:
    onehot_R = functional.one_hot(rank[0], ranks).to(lse_T.dtype)
    return torch.cat([torch.outer(lse_T, onehot_R), picked_T[:, None]], dim=1)


def cross_entropy_of_parts(parts: Tensor, targets_T: Tensor) -> Tensor:
    return ((torch.logsumexp(parts[:, :-1], dim=1) - parts[:, -1]) * (targets_T >= 0)).sum()


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
) -> tuple[Tensor, Tensor]:
    logp_T = logits_TV.log_softmax(dim=1).gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    logp_T = torch.where(targets_T < 0, 0.0, logp_T)
    ratio_T = torch.exp(logp_T - old_T)
    loss_T = -torch.min(ratio_T * advantage_T, torch.clamp(ratio_T, 1 - low, 1 + high) * advantage_T)
    if reference_T is not None:
        loss_T = loss_T + kl * (ratio_T if corrected else 1) * (
            torch.exp(reference_T - logp_T) - (reference_T - logp_T) - 1
        )
    return (torch.where(targets_T < 0, 0.0, loss_T) * weight_T).sum(), logp_T.detach()
