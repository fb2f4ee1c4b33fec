"""A linear layer fused with the cross entropy of its outputs, over the whole vocabulary or a part of it. The full
logits are never stored.

By definition this is `linear`, then `cross_entropy`, and their gradients; logits and their gradients are rounded where
those ops round them. Logits are computed in blocks, and recomputed in each of the two gradients: five products of T·D·V
instead of three. No sum is split over blocks: a block is some rows for the loss and the input gradient, some columns
for the weight gradient. So the results equal those of the unfused ops, bit for bit where a product's bits do not depend
on its size, as in C++. T tokens, D inputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from runtime.ops.cross_entropy import cross_entropy_dgrad, cross_entropy_part, cross_entropy_part_dgrad, sum_losses
from runtime.ops.linear import linear, linear_wgrad_
from runtime.ops.product import product_, wide_dtype

Gradient = Callable[..., Tensor]  # (logits, targets, lse, …) of some rows or columns -> the gradient of these logits

# Logits per block: 16 MiB of FP32. Each product packs the whole weight, so blocks need many rows.
BLOCK = 2**22
LEAST = 64  # fewest rows or columns of a block


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """h_TD, w_VD, targets_T (int64) -> loss [], lse_T, both at least FP32: `cross_entropy` of h·wᵀ."""
    lse_T, picked_T = linear_cross_entropy_part(h_TD, w_VD, targets_T)
    return sum_losses(lse_T, picked_T, targets_T), lse_T


def linear_cross_entropy_dgrad(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], h_TD, w_VD, targets_T, lse_T -> dh_TD = dlogits·w."""
    return _dgrad(partial(cross_entropy_dgrad, dloss), h_TD, w_VD, targets_T, lse_T)


def linear_cross_entropy_wgrad(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], h_TD, w_VD, targets_T, lse_T -> dw_VD = dlogitsᵀ·h."""
    return _wgrad(partial(cross_entropy_dgrad, dloss), h_TD, w_VD, targets_T, lse_T)


def linear_cross_entropy_wgrad_(
    acc_VD: Tensor, dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> None:
    """acc_VD += dw_VD of (dloss, h_TD, w_VD, targets_T, lse_T)."""
    _wgrad_(acc_VD, partial(cross_entropy_dgrad, dloss), h_TD, w_VD, targets_T, lse_T)


def linear_cross_entropy_part(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """h_TD, w_VD, targets_T (int64) -> lse_T, picked_T, both at least FP32: `cross_entropy_part` of h·wᵀ."""
    lse_T, picked_T = (h_TD.new_empty(h_TD.shape[0], dtype=wide_dtype(h_TD.dtype)) for _ in range(2))
    for h_tD, targets_t, lse_t, picked_t in _rows(w_VD, h_TD, targets_T, lse_T, picked_T):
        lse, picked = cross_entropy_part(linear(h_tD, w_VD), targets_t)
        lse_t.copy_(lse)
        picked_t.copy_(picked)
    return lse_T, picked_T


def linear_cross_entropy_part_dgrad(
    dlse_T: Tensor, dpicked_T: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> Tensor:
    """dlse_T, dpicked_T, h_TD, w_VD, targets_T, lse_T -> dh_TD = dlogits·w."""
    return _dgrad(_of_part, h_TD, w_VD, targets_T, lse_T, dlse_T, dpicked_T)


def linear_cross_entropy_part_wgrad(
    dlse_T: Tensor, dpicked_T: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> Tensor:
    """dlse_T, dpicked_T, h_TD, w_VD, targets_T, lse_T -> dw_VD = dlogitsᵀ·h."""
    return _wgrad(_of_part, h_TD, w_VD, targets_T, lse_T, dlse_T, dpicked_T)


def linear_cross_entropy_part_wgrad_(
    acc_VD: Tensor, dlse_T: Tensor, dpicked_T: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> None:
    """acc_VD += dw_VD of (dlse_T, dpicked_T, h_TD, w_VD, targets_T, lse_T)."""
    _wgrad_(acc_VD, _of_part, h_TD, w_VD, targets_T, lse_T, dlse_T, dpicked_T)


def _of_part(logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor, dlse_T: Tensor, dpicked_T: Tensor) -> Tensor:
    return cross_entropy_part_dgrad(dlse_T, dpicked_T, logits_TV, targets_T, lse_T)


def _dgrad(gradient: Gradient, h_TD: Tensor, w_VD: Tensor, *by_row: Tensor) -> Tensor:
    dh_TD = h_TD.new_empty(h_TD.shape)
    for h_tD, dh_tD, *block in _rows(w_VD, h_TD, dh_TD, *by_row):
        product_(dh_tD, gradient(linear(h_tD, w_VD), *block), w_VD)
    return dh_TD


def _wgrad(gradient: Gradient, h_TD: Tensor, w_VD: Tensor, *by_row: Tensor) -> Tensor:
    dw_VD = w_VD.new_empty(w_VD.shape)
    for columns, dlogits_Tv in _gradients(gradient, h_TD, w_VD, *by_row):
        product_(dw_VD[columns], dlogits_Tv.t(), h_TD)
    return dw_VD


def _wgrad_(acc_VD: Tensor, gradient: Gradient, h_TD: Tensor, w_VD: Tensor, *by_row: Tensor) -> None:
    for columns, dlogits_Tv in _gradients(gradient, h_TD, w_VD, *by_row):
        linear_wgrad_(acc_VD[columns], dlogits_Tv, h_TD)


def _rows(w_VD: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a block of rows of each tensor at a time."""
    rows = max(LEAST, BLOCK // w_VD.shape[0])
    return zip(*(tensor.split(rows) for tensor in by_row), strict=True)


def _gradients(
    gradient: Gradient, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, *by_row: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of columns of the logits, with their gradients. Targets outside a block share one extra column."""
    T, V = h_TD.shape[0], w_VD.shape[0]
    width = max(LEAST, BLOCK // max(1, T) // LEAST * LEAST)
    for first in range(0, V, width):
        w_vD = w_VD[first : first + width]
        v = w_vD.shape[0]
        logits_Tv = h_TD.new_zeros((T, v + 1))
        product_(logits_Tv[:, :v], h_TD, w_vD.t())
        here_T = targets_T - first
        here_T = here_T.where((here_T >= 0) & (here_T < v), v)
        here_T = here_T.where((targets_T >= 0) & (targets_T < V), targets_T.clamp(max=v + 1))  # not in the vocabulary
        yield slice(first, first + v), gradient(logits_Tv, here_T, *by_row)[:, :v]


OPS = (
    linear_cross_entropy,
    linear_cross_entropy_dgrad,
    linear_cross_entropy_wgrad,
    linear_cross_entropy_wgrad_,
    linear_cross_entropy_part,
    linear_cross_entropy_part_dgrad,
    linear_cross_entropy_part_wgrad,
    linear_cross_entropy_part_wgrad_,
)
