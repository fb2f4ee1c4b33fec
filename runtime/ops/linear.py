"""y = x·wᵀ and its two gradients. T rows, K inputs, N outputs."""

from __future__ import annotations

from torch import Tensor

from runtime.ops.product import add_product_, product


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x_TK, w_NK -> y_TN."""
    return product(x_TK, w_NK.t())


def linear_detached(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x_TK, w_NK -> y_TN; x has no gradient."""
    return product(x_TK, w_NK.t())


def linear_dgrad(dy_TN: Tensor, w_NK: Tensor) -> Tensor:
    """dy_TN, w_NK -> dx_TK."""
    return product(dy_TN, w_NK)


def linear_wgrad(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """dy_TN, x_TK -> dw_NK."""
    return product(dy_TN.t(), x_TK)


def linear_wgrad_(acc_NK: Tensor, dy_TN: Tensor, x_TK: Tensor) -> None:
    """acc_NK += dw_NK of (dy_TN, x_TK)."""
    add_product_(acc_NK, dy_TN.t(), x_TK)


OPS = (linear, linear_detached, linear_dgrad, linear_wgrad, linear_wgrad_)
