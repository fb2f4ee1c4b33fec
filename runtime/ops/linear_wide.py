"""A linear whose outputs are FP32 where its inputs are BF16, for logits that choices are made by. T rows, K inputs, N
outputs.

With eight bits many experts would have equal scores, and a balancing bias that moves by 0.001 would move none past
another. The few columns of a router cost little in FP32. In FP32 and FP64 it is `linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.product import add_product_, bf16_parts, wide_product
from runtime.ops.wide import wide


def linear_wide(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x_TK, w_NK -> y_TN, FP32 at least."""
    return wide_product(x_TK, w_NK.t())


def linear_wide_dgrad(dy_TN: Tensor, w_NK: Tensor) -> Tensor:
    """dy_TN, w_NK -> dx_TK, in the dtype of w."""
    return wide_product(dy_TN, w_NK).to(w_NK.dtype)


def linear_wide_wgrad(dy_TN: Tensor, x_TK: Tensor) -> Tensor:
    """dy_TN, x_TK -> dw_NK, in the dtype of x."""
    return wide_product(dy_TN.t(), x_TK).to(x_TK.dtype)


def linear_wide_wgrad_(acc_NK: Tensor, dy_TN: Tensor, x_TK: Tensor) -> None:
    """acc_NK += dw_NK of (dy_TN, x_TK)."""
    if x_TK.is_cuda and x_TK.dtype == torch.bfloat16:  # on the tensor cores
        for part_TN in bf16_parts(dy_TN):
            add_product_(acc_NK, part_TN.t(), x_TK)
    else:
        add_product_(acc_NK, dy_TN.t(), wide(x_TK))


OPS = (linear_wide, linear_wide_dgrad, linear_wide_wgrad, linear_wide_wgrad_)
