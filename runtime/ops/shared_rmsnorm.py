"""RMSNorm of rows whose columns are spread over ranks: y = x·rstd·w with rstd = 1/√(squares / width + eps).

Each rank has some of the columns. It sums their squares (`two_squares`), the ranks add these up, and each norms its
columns by the sum over all `width` columns. T rows, W columns here. `x` and `dy` may be views of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.wide import wide


def two_squares(x_TW: Tensor, first: int, second: int) -> Tensor:
    """x_TW -> squares_T2 (FP32 at least): of each row the sums of the squares of its `first` columns, and of the
    `second` ones behind them."""
    parts = wide(x_TW).split((first, second, x_TW.shape[1] - first - second), dim=1)
    return torch.stack([torch.linalg.vector_norm(part, dim=1).square_() for part in parts[:2]], dim=1)


def two_squares_dgrad(dsquares_T2: Tensor, x_TW: Tensor, first: int, second: int) -> Tensor:
    """dsquares_T2, x_TW -> dx_TW = 2·x·dsquares; 0 in the columns that are in neither sum."""
    dx_TW = torch.zeros_like(x_TW, memory_format=torch.contiguous_format)
    for at, columns in enumerate((slice(first), slice(first, first + second))):
        dx_TW[:, columns] = wide(x_TW[:, columns]) * (2 * dsquares_T2[:, at : at + 1])
    return dx_TW


def shared_rmsnorm(x_TW: Tensor, w_W: Tensor, squares_T1: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """x_TW, w_W, squares_T1 of all columns -> y_TW, rstd_T (FP32 at least)."""
    rstd_T = (squares_T1.squeeze(1) / width + eps).rsqrt_()
    return (wide(x_TW) * rstd_T[:, None]).mul_(w_W).to(x_TW.dtype), rstd_T


def shared_rmsnorm_dgrad(dy_TW: Tensor, x_TW: Tensor, w_W: Tensor, rstd_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """dy_TW, x_TW, w_W, rstd_T -> dx_TW = dy·w·rstd, and dsquares_T1 = −rstd³ / (2·width) · Σ dy·w·x."""
    dx_TW = wide(dy_TW) * wide(w_W)
    dsquares_T = (dx_TW * x_TW).sum(dim=1) * rstd_T**3 / (-2 * width)
    return dx_TW.mul_(rstd_T[:, None]).to(x_TW.dtype), dsquares_T[:, None]


OPS = (two_squares, two_squares_dgrad, shared_rmsnorm, shared_rmsnorm_dgrad)
