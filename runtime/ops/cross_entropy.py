"""Cross entropy of next-token logits, summed over the valid targets: those ≥ 0. T tokens, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide, wide_dtype

BLOCK = 2**18  # logits per block: 1 MiB of FP32, so that no second [T, V] tensor is needed
ELSEWHERE = 2**26  # on other devices than CPUs, for fewer launches


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """logits_TV, targets_T (int64) -> loss [] = Σ lse − logit of the target, lse_T = log Σ_v exp(logits), both at least
    FP32."""
    if runs_natively(logits_TV):
        return native.cross_entropy(logits_TV, targets_T)
    lse_T = _logsumexp(logits_TV)
    return sum_losses(lse_T, logits_at_targets(logits_TV, targets_T), targets_T), lse_T


def logits_at_targets(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """logits_TV, targets_T -> each row's logit at its target; arbitrary for a target < 0, NaN for a target ≥ V."""
    V = logits_TV.shape[1]
    return logits_TV.gather(1, targets_T.clamp(0, V - 1)[:, None])[:, 0].masked_fill_(targets_T >= V, torch.nan)


def sum_losses(lse_T: Tensor, picked_T: Tensor, targets_T: Tensor) -> Tensor:
    """lse_T, picked_T, targets_T -> loss [], summed in FP64, so that the order of rows does not change the bits of an
    FP32 loss."""
    return (lse_T - picked_T).masked_fill_(targets_T < 0, 0).sum(dtype=torch.float64).to(lse_T.dtype)


def cross_entropy_dgrad(dloss: Tensor, logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], logits_TV, targets_T, lse_T -> dlogits_TV = (softmax − onehot)·dloss, 0 in rows whose target is < 0."""
    if runs_natively(logits_TV):
        return native.cross_entropy_dgrad(dloss, logits_TV, targets_T, lse_T)
    dloss_T = dloss.expand(targets_T.shape).masked_fill(targets_T < 0, 0)
    return cross_entropy_part_dgrad(dloss_T, -dloss_T, logits_TV, targets_T, lse_T)


def cross_entropy_part(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """logits_TV of one part of the vocabulary, targets_T relative to its first word -> lse_T = log Σ_v exp(logits), and
    picked_T, each row's logit at its target: 0 for a target < 0, which is invalid or in another part."""
    lse_T = cross_entropy(logits_TV, targets_T)[1]
    return lse_T, wide(logits_at_targets(logits_TV, targets_T)).masked_fill_(targets_T < 0, 0)


def cross_entropy_part_dgrad(
    dlse_T: Tensor, dpicked_T: Tensor, logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor
) -> Tensor:
    """dlse_T, dpicked_T, logits_TV, targets_T, lse_T -> dlogits_TV = softmax·dlse + onehot·dpicked."""
    dpicked_T = dpicked_T.masked_fill(targets_T < 0, 0).masked_fill_(targets_T >= logits_TV.shape[1], torch.nan)
    by_row = (dlse_T, dpicked_T, logits_TV, targets_T, lse_T)
    if logits_TV.dtype != torch.bfloat16:
        return _dgrad(*by_row)
    dlogits_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    blocks = (tensor.split(_rows(logits_TV)) for tensor in (*by_row, dlogits_TV))
    for *block, dlogits_tV in zip(*blocks, strict=True):
        dlogits_tV.copy_(_dgrad(*block))
    return dlogits_TV


def _dgrad(dlse_T: Tensor, dpicked_T: Tensor, logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """Return the gradient of a block of rows, in at least FP32."""
    dlogits_TV = torch.sub(wide(logits_TV), lse_T[:, None]).exp_().mul_(dlse_T[:, None])
    return dlogits_TV.scatter_add_(1, targets_T.clamp(0, logits_TV.shape[1] - 1)[:, None], dpicked_T[:, None])


def _logsumexp(logits_TV: Tensor) -> Tensor:
    """logits_TV -> lse_T, by log_softmax: 0.73 ms; torch.logsumexp takes 1.05 (T 256, V 4096, FP32, one core)."""
    lse_T = logits_TV.new_empty(logits_TV.shape[0], dtype=wide_dtype(logits_TV.dtype))
    for logits_tV, lse_t in zip(logits_TV.split(_rows(logits_TV)), lse_T.split(_rows(logits_TV)), strict=True):
        logits_tV = wide(logits_tV)
        # At the largest logit, log_softmax = largest − lse loses no precision: it lies between −log V and 0.
        torch.sub(logits_tV.amax(dim=-1), torch.log_softmax(logits_tV, dim=-1).amax(dim=-1), out=lse_t)
    return lse_T


def _rows(logits_TV: Tensor) -> int:
    """Return the number of rows per block."""
    return max(1, (BLOCK if logits_TV.is_cpu else ELSEWHERE) // logits_TV.shape[1])


# --- Cross entropy where each tensor rank has the logits of one part of the vocabulary, and lse and picked of its part
# from `cross_entropy_part`. T tokens, R ranks
#
# A row of `parts` has the lse of each rank's part, then the logit of the target, which one rank has. A rank fills the
# places of the other ranks with zeros, so the sum over ranks is exact.


def place_parts(lse_T: Tensor, picked_T: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """lse_T, picked_T, rank [1] (int64), ranks -> parts [T, R + 1], zero in the places of other ranks."""
    parts = lse_T.new_zeros(lse_T.shape[0], ranks + 1)
    parts.index_copy_(1, rank, lse_T[:, None])
    parts[:, ranks] = picked_T
    return parts


def place_parts_dgrad(dy: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """dy [T, R + 1], rank [1] -> dlse_T, dpicked_T."""
    return dy.index_select(1, rank)[:, 0], dy[:, -1].clone()


def cross_entropy_of_parts(parts: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """parts [T, R + 1], targets_T -> loss [] = Σ lse − logit of the target, over targets ≥ 0; lse_T of the whole
    vocabulary."""
    lse_T = torch.logsumexp(parts[:, :-1], dim=1)
    return sum_losses(lse_T, parts[:, -1], targets_T), lse_T


def cross_entropy_of_parts_dgrad(dloss: Tensor, parts: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], parts, targets_T, lse_T -> dparts: each rank's softmax share, and −1, times dloss; 0 for targets <
    0."""
    dloss_T1 = dloss.expand(targets_T.shape).masked_fill(targets_T < 0, 0)[:, None]
    share_TR = torch.sub(parts[:, :-1], lse_T[:, None]).exp_().mul_(dloss_T1)
    return torch.cat([share_TR, -dloss_T1], dim=1)


OPS = (
    cross_entropy,
    cross_entropy_dgrad,
    cross_entropy_part,
    cross_entropy_part_dgrad,
    place_parts,
    place_parts_dgrad,
    cross_entropy_of_parts,
    cross_entropy_of_parts_dgrad,
)
