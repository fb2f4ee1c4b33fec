"""A linear layer and the cross entropy of its outputs, without a tensor of all logits.

By definition `linear`, then `cross_entropy`, and their gradients, with logits and their gradients rounded where those
round them. Logits are made block by block, and again in either gradient: five products of T·D·V instead of three. No
sum is split over blocks: those of the loss and of the input gradient are some rows, those of the weight gradient some
columns. So the numbers are those of the unfused ops, to the bit where a product's bits do not depend on its size, as in
C++. T tokens, D inputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from runtime.ops.cross_entropy import cross_entropy, cross_entropy_dgrad, picked, summed
from runtime.ops.linear import linear, linear_wgrad_
from runtime.ops.product import product_
from runtime.ops.wide import wide_dtype

# Logits at a time: 16 MiB of FP32. The weight is packed for each product of it: blocks must be high.
BLOCK = 2**22
LEAST = 64  # rows or columns of a block


def linear_cross_entropy(h_TD: Tensor, w_VD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """h_TD, w_VD, targets_T (int64) -> loss [], lse_T, both FP32 at least: `cross_entropy` of h·wᵀ."""
    lse_T, picked_T = (h_TD.new_empty(h_TD.shape[0], dtype=wide_dtype(h_TD.dtype)) for _ in range(2))
    for h_tD, targets_t, lse_t, picked_t in _rows(w_VD, h_TD, targets_T, lse_T, picked_T):
        logits_tV = linear(h_tD, w_VD)
        lse_t.copy_(cross_entropy(logits_tV, targets_t)[1])
        picked_t.copy_(picked(logits_tV, targets_t))
    return summed(lse_T, picked_T, targets_T), lse_T


def linear_cross_entropy_dgrad(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], h_TD, w_VD, targets_T, lse_T -> dh_TD = dlogits·w."""
    dh_TD = h_TD.new_empty(h_TD.shape)
    for h_tD, targets_t, lse_t, dh_tD in _rows(w_VD, h_TD, targets_T, lse_T, dh_TD):
        product_(dh_tD, cross_entropy_dgrad(dloss, linear(h_tD, w_VD), targets_t, lse_t), w_VD)
    return dh_TD


def linear_cross_entropy_wgrad(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    """dloss [], h_TD, w_VD, targets_T, lse_T -> dw_VD = dlogitsᵀ·h."""
    dw_VD = w_VD.new_empty(w_VD.shape)
    for columns, dlogits_Tv in _gradients(dloss, h_TD, w_VD, targets_T, lse_T):
        product_(dw_VD[columns], dlogits_Tv.t(), h_TD)
    return dw_VD


def linear_cross_entropy_wgrad_(
    acc_VD: Tensor, dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> None:
    """acc_VD += dw_VD of (dloss, h_TD, w_VD, targets_T, lse_T)."""
    for columns, dlogits_Tv in _gradients(dloss, h_TD, w_VD, targets_T, lse_T):
        linear_wgrad_(acc_VD[columns], dlogits_Tv, h_TD)


def _rows(w_VD: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each tensor at a time."""
    rows = max(LEAST, BLOCK // w_VD.shape[0])
    return zip(*(tensor.split(rows) for tensor in by_row), strict=True)


def _gradients(
    dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, lse_T: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the logits at a time, and their gradients. The targets that are others share one more column."""
    T, V = h_TD.shape[0], w_VD.shape[0]
    width = max(LEAST, BLOCK // max(1, T) // LEAST * LEAST)
    for first in range(0, V, width):
        w_vD = w_VD[first : first + width]
        v = w_vD.shape[0]
        logits_Tv = h_TD.new_zeros((T, v + 1))
        product_(logits_Tv[:, :v], h_TD, w_vD.t())
        here_T = targets_T - first
        here_T = here_T.where((here_T >= 0) & (here_T < v), v)
        here_T = here_T.where((targets_T >= 0) & (targets_T < V), targets_T.clamp(max=v + 1))  # void, or no column
        yield slice(first, first + v), cross_entropy_dgrad(dloss, logits_Tv, here_T, lse_T)[:, :v]


OPS = (linear_cross_entropy, linear_cross_entropy_dgrad, linear_cross_entropy_wgrad, linear_cross_entropy_wgrad_)
