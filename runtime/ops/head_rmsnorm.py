"""RMSNorm over the columns of every head, with one weight for all heads or none. T rows, H heads of C columns.

As Qwen3 norms queries and keys, and DeepSeek-V4, without a weight, queries. W = H·C; `x` and `dy` may be views of
columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.rmsnorm import rmsnorm, rmsnorm_dgrad, rmsnorm_wgrad, rmsnorm_wgrad_
from runtime.ops.wide import wide


def head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x_TW, w_C -> y_TW, rstd_TH."""
    y, rstd = rmsnorm(x_TW.reshape(-1, w_C.shape[0]), w_C, eps)
    return y.view(x_TW.shape), rstd.view(x_TW.shape[0], x_TW.shape[1] // w_C.shape[0])


def head_rmsnorm_dgrad(dy_TW: Tensor, x_TW: Tensor, w_C: Tensor, rstd_TH: Tensor) -> Tensor:
    """dy_TW, x_TW, w_C, rstd_TH -> dx_TW."""
    C = w_C.shape[0]
    return rmsnorm_dgrad(dy_TW.reshape(-1, C), x_TW.reshape(-1, C), w_C, rstd_TH.flatten()).view(x_TW.shape)


def head_rmsnorm_wgrad(dy_TW: Tensor, x_TW: Tensor, rstd_TH: Tensor) -> Tensor:
    """dy_TW, x_TW, rstd_TH -> dw_C, summed over rows and heads."""
    C = x_TW.shape[1] // rstd_TH.shape[1]
    return rmsnorm_wgrad(dy_TW.reshape(-1, C), x_TW.reshape(-1, C), rstd_TH.flatten())


def head_rmsnorm_wgrad_(acc_C: Tensor, dy_TW: Tensor, x_TW: Tensor, rstd_TH: Tensor) -> None:
    """acc_C += dw_C of (dy_TW, x_TW, rstd_TH)."""
    C = acc_C.shape[0]
    rmsnorm_wgrad_(acc_C, dy_TW.reshape(-1, C), x_TW.reshape(-1, C), rstd_TH.flatten())


def unweighted_rmsnorm(x: Tensor, heads: int, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H·C] -> y [T, H·C], rstd [T, H]: every head divided by the root of its mean square."""
    x_THC = wide(x).unflatten(1, (heads, -1))
    rstd_TH = torch.rsqrt(x_THC.square().mean(dim=-1) + eps)
    return (x_THC * rstd_TH[..., None]).flatten(1).to(x.dtype), rstd_TH


def unweighted_rmsnorm_dgrad(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dy and x [T, H·C], rstd [T, H] -> dx [T, H·C]."""
    dy_THC, x_THC = (wide(each).unflatten(1, (rstd.shape[1], -1)) for each in (dy, x))
    normed_THC = x_THC * rstd[..., None]
    along_TH1 = (dy_THC * normed_THC).mean(dim=-1, keepdim=True)
    return ((dy_THC - normed_THC * along_TH1) * rstd[..., None]).flatten(1).to(x.dtype)


OPS = (
    head_rmsnorm,
    head_rmsnorm_dgrad,
    head_rmsnorm_wgrad,
    head_rmsnorm_wgrad_,
    unweighted_rmsnorm,
    unweighted_rmsnorm_dgrad,
)
