"""y = x·wᵀ and its two gradients. T rows, K inputs, N outputs."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x_TK, w_NK -> y_TN."""
    return torch.mm(x_TK, w_NK.t())


def linear_dgrad(dy_TN: Tensor, w_NK: Tensor) -> Tensor:
    """dy_TN, w_NK -> dx_TK."""
    return torch.mm(dy_TN, w_NK)


def linear_wgrad(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """dy_TN, x_TK -> dw_NK."""
    return torch.mm(dy_TN.t(), x_TK)


def linear_wgrad_(acc_NK: Tensor, dy_TN: Tensor, x_TK: Tensor) -> None:
    """acc_NK += dw_NK of (dy_TN, x_TK)."""
    add_product_(acc_NK, dy_TN.t(), x_TK)


def add_product_(acc_NK: Tensor, a_NT: Tensor, b_TK: Tensor) -> None:
    """acc_NK += a·b. In one dtype adding inside the product costs no more than the product. No product of BF16 gives
    FP32 on the CPU: there it is rounded, then added in FP32."""
    if acc_NK.dtype == a_NT.dtype:
        acc_NK.addmm_(a_NT, b_TK)
    else:
        acc_NK.add_(torch.mm(a_NT, b_TK))
