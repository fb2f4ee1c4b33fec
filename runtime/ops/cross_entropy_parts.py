"""Cross entropy where each tensor rank has the logits of a part of the vocabulary (`cross_entropy_part` gives both
numbers of its rows). T tokens, R ranks.

`parts` of a row are what each rank has as the logarithm of its sum of exponentials, and then the logit of the target,
which one of them has. A rank gives zeros in the place of what others have: the sum of what all give is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.cross_entropy import summed


def place_parts(lse_T: Tensor, picked_T: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """lse_T, picked_T, rank [1] (int64), ranks -> parts [T, R + 1], what other ranks have left zero."""
    parts = lse_T.new_zeros(lse_T.shape[0], ranks + 1)
    parts.index_copy_(1, rank, lse_T[:, None])
    parts[:, ranks] = picked_T
    return parts


def place_parts_dgrad(dy: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """dy [T, R + 1], rank [1] -> dlse_T, dpicked_T."""
    return dy.index_select(1, rank)[:, 0], dy[:, -1].clone()


def cross_entropy_of_parts(parts: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """parts [T, R + 1], targets_T -> loss [] = Σ lse − logit of the target, of targets ≥ 0; lse_T of all parts."""
    lse_T = torch.logsumexp(parts[:, :-1], dim=1)
    return summed(lse_T, parts[:, -1], targets_T), lse_T


def cross_entropy_of_parts_dgrad(dloss: Tensor, parts: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], parts, targets_T, lse_T -> dparts: the share of each rank, and −1, times dloss; 0 of void targets."""
    dloss_T1 = dloss.expand(targets_T.shape).masked_fill(targets_T < 0, 0)[:, None]
    share_TR = torch.sub(parts[:, :-1], lse_T[:, None]).exp_().mul_(dloss_T1)
    return torch.cat([share_TR, -dloss_T1], dim=1)


OPS = (place_parts, place_parts_dgrad, cross_entropy_of_parts, cross_entropy_of_parts_dgrad)
