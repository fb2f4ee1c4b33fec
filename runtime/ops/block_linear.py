"""y = x·wᵀ with a block-diagonal w, and its two gradients: groups of columns, each with a matrix of its own.

DeepSeek-V4's grouped output projection, arXiv 2606.19348, §2.3.1. T rows, G groups of K inputs and N outputs. The
blocks of w lie one below another. Each is a product of its own: there are 8 or 16 of them, and they are large.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.product import add_product_, product_


def block_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [T, G·K], w [G·N, K] -> y [T, G·N]."""
    groups = x.shape[1] // w.shape[1]
    y = x.new_empty((len(x), len(w)))
    for x_TK, w_NK, y_TN in zip(x.chunk(groups, 1), w.chunk(groups), y.chunk(groups, 1), strict=True):
        product_(y_TN, x_TK, w_NK.t())
    return y


def block_linear_dgrad(dy: Tensor, w: Tensor, columns: int) -> Tensor:
    """dy [T, G·N], w [G·N, K] -> dx [T, G·K]; `columns`: how many x has."""
    groups = columns // w.shape[1]
    dx = dy.new_empty((len(dy), columns))
    for dy_TN, w_NK, dx_TK in zip(dy.chunk(groups, 1), w.chunk(groups), dx.chunk(groups, 1), strict=True):
        product_(dx_TK, dy_TN, w_NK)
    return dx


def block_linear_wgrad(dy: Tensor, x: Tensor, inputs: int) -> Tensor:
    """dy [T, G·N], x [T, G·K] -> dw [G·N, K]; `inputs`: K."""
    groups = x.shape[1] // inputs
    dw = dy.new_empty((dy.shape[1], inputs))
    for dy_TN, x_TK, dw_NK in zip(dy.chunk(groups, 1), x.chunk(groups, 1), dw.chunk(groups), strict=True):
        product_(dw_NK, dy_TN.t(), x_TK)
    return dw


def block_linear_wgrad_(acc: Tensor, dy: Tensor, x: Tensor) -> None:
    """acc [G·N, K] += dw of (dy, x), in the dtype of acc."""
    groups = x.shape[1] // acc.shape[1]
    for dy_TN, x_TK, acc_NK in zip(dy.chunk(groups, 1), x.chunk(groups, 1), acc.chunk(groups), strict=True):
        add_product_(acc_NK, dy_TN.t(), x_TK)


OPS = (block_linear, block_linear_dgrad, block_linear_wgrad, block_linear_wgrad_)
