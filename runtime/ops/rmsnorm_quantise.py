"""RMSNorm whose result is quantised in the same pass, in tiles of rows. T rows, D columns, B tiles.

Each is the ops one after the other: the norm's result is rounded, and then quantised. `_wide` ops return it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.quantise import quantise
from runtime.ops.rmsnorm import rmsnorm


def rmsnorm_quantise(x_TD: Tensor, w_D: Tensor, eps: float, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x_TD, w_D -> q_TD, s_TB, rstd_T."""
    return rmsnorm_quantise_wide(x_TD, w_D, eps, pow2)[1:]


def rmsnorm_quantise_wide(
    x_TD: Tensor, w_D: Tensor, eps: float, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD, w_D -> y_TD, q_TD, s_TB, rstd_T."""
    y_TD, rstd_T = rmsnorm(x_TD, w_D, eps)
    return y_TD, *quantise(y_TD, pow2), rstd_T


def add_rmsnorm_quantise(
    h_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h_TD, x_TD, w_D -> sum_TD = h + x, q_TD, s_TB, rstd_T of the sum."""
    sum_TD = torch.add(h_TD, x_TD)
    return sum_TD, *rmsnorm_quantise(sum_TD, w_D, eps, pow2)


def add_rmsnorm_quantise_wide(
    h_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """h_TD, x_TD, w_D -> sum_TD = h + x, y_TD, q_TD, s_TB, rstd_T of the sum."""
    sum_TD = torch.add(h_TD, x_TD)
    return sum_TD, *rmsnorm_quantise_wide(sum_TD, w_D, eps, pow2)


OPS = (rmsnorm_quantise, rmsnorm_quantise_wide, add_rmsnorm_quantise, add_rmsnorm_quantise_wide)
