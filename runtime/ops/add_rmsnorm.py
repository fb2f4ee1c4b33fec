"""RMSNorm with the residual's addition in the same pass: before it in the forward, after it in the backward.

T rows, D columns. Each is the two ops one after the other, and rounds where they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.rmsnorm import rmsnorm, rmsnorm_dgrad


def add_rmsnorm(h_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h_TD, x_TD, w_D -> sum_TD = h + x, y_TD, rstd_T of the sum."""
    sum_TD = torch.add(h_TD, x_TD)
    return sum_TD, *rmsnorm(sum_TD, w_D, eps)


def rmsnorm_dgrad_add(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor, add_TD: Tensor) -> Tensor:
    """dy_TD, x_TD, w_D, rstd_T, add_TD -> dx_TD + add_TD: the gradient past the norm and the one around it."""
    return torch.add(rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T), add_TD)


OPS = (add_rmsnorm, rmsnorm_dgrad_add)
