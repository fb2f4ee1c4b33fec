"""The gradient of an RMSNorm in one pass with what stands around it: the sums that its dy comes from, the norm itself,
computed again, and the gradient of the residual stream.

T tokens, D columns, S = T·K rows, B tiles. Each is the ops one after the other, and rounds where they do. `sum_`: dy is
a + b. `permuted_`: dy is what `permute_dgrad_add` gives. `_again`: the norm's result, for its readers in W, and `rstd`
are computed of `x`, and returned behind dy; `_again_quantise`: the result in tiles of rows. dx + add is returned last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.add_rmsnorm import rmsnorm_dgrad_add
from runtime.ops.permute import permute_dgrad_add
from runtime.ops.rmsnorm import rmsnorm
from runtime.ops.rmsnorm_quantise import rmsnorm_quantise


def rmsnorm_again_dgrad_add(
    dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, add_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dy_TD, x_TD, w_D, add_TD -> y_TD, rstd_T, dx_TD + add_TD."""
    y_TD, rstd_T = rmsnorm(x_TD, w_D, eps)
    return y_TD, rstd_T, rmsnorm_dgrad_add(dy_TD, x_TD, w_D, rstd_T, add_TD)


def rmsnorm_again_quantise_dgrad_add(
    dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, add_TD: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy_TD, x_TD, w_D, add_TD -> q_TD, s_TB, rstd_T, dx_TD + add_TD."""
    q_TD, s_TB, rstd_T = rmsnorm_quantise(x_TD, w_D, eps, pow2)
    return q_TD, s_TB, rstd_T, rmsnorm_dgrad_add(dy_TD, x_TD, w_D, rstd_T, add_TD)


def sum_rmsnorm_dgrad_add(
    a_TD: Tensor, b_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor, add_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """a_TD, b_TD, x_TD, w_D, rstd_T, add_TD -> dy_TD = a + b, dx_TD + add_TD."""
    dy_TD = torch.add(a_TD, b_TD)
    return dy_TD, rmsnorm_dgrad_add(dy_TD, x_TD, w_D, rstd_T, add_TD)


def sum_rmsnorm_again_dgrad_add(
    a_TD: Tensor, b_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, add_TD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a_TD, b_TD, x_TD, w_D, add_TD -> dy_TD = a + b, y_TD, rstd_T, dx_TD + add_TD."""
    dy_TD = torch.add(a_TD, b_TD)
    return dy_TD, *rmsnorm_again_dgrad_add(dy_TD, x_TD, w_D, eps, add_TD)


def sum_rmsnorm_again_quantise_dgrad_add(
    a_TD: Tensor, b_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float, add_TD: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """a_TD, b_TD, x_TD, w_D, add_TD -> dy_TD = a + b, q_TD, s_TB, rstd_T, dx_TD + add_TD."""
    dy_TD = torch.add(a_TD, b_TD)
    return dy_TD, *rmsnorm_again_quantise_dgrad_add(dy_TD, x_TD, w_D, eps, add_TD, pow2)


def permuted_rmsnorm_dgrad_add(
    drows_SD: Tensor,
    order_S: Tensor,
    top_k: int,
    other_TD: Tensor,
    more_TD: Tensor | None,
    x_TD: Tensor,
    w_D: Tensor,
    rstd_T: Tensor,
    add_TD: Tensor,
) -> tuple[Tensor, Tensor]:
    """What `permute_dgrad_add` takes, x_TD, w_D, rstd_T, add_TD -> dy_TD, dx_TD + add_TD."""
    dy_TD = permute_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD)
    return dy_TD, rmsnorm_dgrad_add(dy_TD, x_TD, w_D, rstd_T, add_TD)


def permuted_rmsnorm_again_dgrad_add(
    drows_SD: Tensor,
    order_S: Tensor,
    top_k: int,
    other_TD: Tensor,
    more_TD: Tensor | None,
    x_TD: Tensor,
    w_D: Tensor,
    eps: float,
    add_TD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `permute_dgrad_add` takes, x_TD, w_D, add_TD -> dy_TD, y_TD, rstd_T, dx_TD + add_TD."""
    dy_TD = permute_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD)
    return dy_TD, *rmsnorm_again_dgrad_add(dy_TD, x_TD, w_D, eps, add_TD)


OPS = (
    rmsnorm_again_dgrad_add,
    rmsnorm_again_quantise_dgrad_add,
    sum_rmsnorm_dgrad_add,
    sum_rmsnorm_again_dgrad_add,
    sum_rmsnorm_again_quantise_dgrad_add,
    permuted_rmsnorm_dgrad_add,
    permuted_rmsnorm_again_dgrad_add,
)
