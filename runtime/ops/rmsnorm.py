"""RMSNorm of rows, of heads, and of rows whose columns are sharded over ranks; and ops fused with it."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide, wide_dtype
from runtime.ops.quantise import quantise
from runtime.ops.routing import permute_dgrad_add

# --- RMSNorm: y = x·rstd·w with rstd = 1/√(mean(x²) + eps) of each row. T rows, D columns
#
# Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. `x` and `dy` may be views of columns.


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x_TD, w_D -> y_TD, rstd_T (at least FP32)."""
    if runs_natively(x_TD, w_D):
        return native.rmsnorm(x_TD, w_D, eps)
    wide_TD = wide(x_TD)
    # vector_norm reads x once: the whole op takes 0.14 ms, with x.square().mean() 0.16 (2048×256, FP32, one core).
    rstd_T = torch.linalg.vector_norm(wide_TD, dim=-1).square_().div_(x_TD.shape[1]).add_(eps).rsqrt_()
    return (wide_TD * rstd_T[:, None]).mul_(w_D).to(x_TD.dtype), rstd_T


def rmsnorm_dgrad(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor) -> Tensor:
    """dy_TD, x_TD, w_D, rstd_T -> dx_TD = rstd·(dy·w − x·rstd²·mean(dy·w·x))."""
    if runs_natively(dy_TD, x_TD, w_D):
        return native.rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T)
    wide_TD, w_D = wide(x_TD), wide(w_D)
    dx_TD = dy_TD * wide_TD
    slope_T = torch.mv(dx_TD, w_D).mul_(rstd_T).mul_(rstd_T).div_(-x_TD.shape[1])
    torch.mul(dy_TD, w_D, out=dx_TD)
    return dx_TD.addcmul_(wide_TD, slope_T[:, None]).mul_(rstd_T[:, None]).to(x_TD.dtype)


def rmsnorm_wgrad(dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> Tensor:
    """dy_TD, x_TD, rstd_T -> dw_D = Σ_t dy·x·rstd."""
    dw_D = rstd_T.new_zeros(x_TD.shape[1], dtype=wide_dtype(x_TD.dtype))
    rmsnorm_wgrad_(dw_D, dy_TD, x_TD, rstd_T)
    return dw_D.to(x_TD.dtype)


def rmsnorm_wgrad_(acc_D: Tensor, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> None:
    """acc_D += dw_D of (dy_TD, x_TD, rstd_T)."""
    if runs_natively(dy_TD, x_TD):
        return native.rmsnorm_wgrad_(acc_D, dy_TD, x_TD, rstd_T)
    acc_D.addmv_((dy_TD * wide(x_TD)).t(), rstd_T)


# --- RMSNorm fused with the residual addition: before the norm in the forward, after it in the backward
#
# T rows, D columns. Each equals the two ops in sequence, and rounds where they do.


def add_rmsnorm(h_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h_TD, x_TD, w_D -> sum_TD = h + x, y_TD, rstd_T of the sum."""
    if runs_natively(h_TD, x_TD, w_D):
        return native.add_rmsnorm(h_TD, x_TD, w_D, eps)
    sum_TD = torch.add(h_TD, x_TD)
    return sum_TD, *rmsnorm(sum_TD, w_D, eps)


def rmsnorm_dgrad_add(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor, add_TD: Tensor) -> Tensor:
    """dy_TD, x_TD, w_D, rstd_T, add_TD -> dx_TD + add_TD: the gradient through the norm plus the gradient of the
    residual around it."""
    if runs_natively(dy_TD, x_TD, w_D, add_TD):
        return native.rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T, add_TD)
    return torch.add(rmsnorm_dgrad(dy_TD, x_TD, w_D, rstd_T), add_TD)


# --- RMSNorm over the columns of each head, with one weight shared by all heads, or none. T rows, H heads of C columns
#
# Qwen3 uses it for queries and keys; DeepSeek-V4, without a weight, for queries. W = H·C; `x` and `dy` may be views of
# columns.


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
    """x [T, H·C] -> y [T, H·C], rstd [T, H]: each head divided by its root mean square."""
    x_THC = wide(x).unflatten(1, (heads, -1))
    rstd_TH = torch.rsqrt(x_THC.square().mean(dim=-1) + eps)
    return (x_THC * rstd_TH[..., None]).flatten(1).to(x.dtype), rstd_TH


def unweighted_rmsnorm_dgrad(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dy and x [T, H·C], rstd [T, H] -> dx [T, H·C]."""
    dy_THC, x_THC = (wide(rows).unflatten(1, (rstd.shape[1], -1)) for rows in (dy, x))
    normed_THC = x_THC * rstd[..., None]
    along_TH1 = (dy_THC * normed_THC).mean(dim=-1, keepdim=True)
    return ((dy_THC - normed_THC * along_TH1) * rstd[..., None]).flatten(1).to(x.dtype)


# --- RMSNorm fused with quantisation of its result in row tiles. T rows, D columns, B tiles
#
# Each equals the separate ops in sequence: the norm's result is rounded, then quantised. `_wide` ops also return the
# unquantised result.


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


# --- RMSNorm of rows whose columns are sharded over ranks: y = x·rstd·w with rstd = 1/√(squares / width + eps)
#
# Each rank has some of the columns. It sums their squares (`two_squares`), an all-reduce adds these up, and each rank
# normalizes its columns by the sum over all `width` columns. T rows, W local columns. `x` and `dy` may be views of
# columns.


def two_squares(x_TW: Tensor, first: int, second: int) -> Tensor:
    """x_TW -> squares_T2 (at least FP32): for each row, the sum of squares over the first `first` columns, and over the
    next `second` columns."""
    parts = wide(x_TW).split((first, second, x_TW.shape[1] - first - second), dim=1)
    return torch.stack([torch.linalg.vector_norm(part, dim=1).square_() for part in parts[:2]], dim=1)


def two_squares_dgrad(dsquares_T2: Tensor, x_TW: Tensor, first: int, second: int) -> Tensor:
    """dsquares_T2, x_TW -> dx_TW = 2·x·dsquares; 0 in columns that are in neither sum."""
    dx_TW = torch.zeros_like(x_TW, memory_format=torch.contiguous_format)
    for index, columns in enumerate((slice(first), slice(first, first + second))):
        dx_TW[:, columns] = wide(x_TW[:, columns]) * (2 * dsquares_T2[:, index : index + 1])
    return dx_TW


def shared_rmsnorm(x_TW: Tensor, w_W: Tensor, squares_T1: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """x_TW, w_W, squares_T1 of all columns -> y_TW, rstd_T (at least FP32)."""
    rstd_T = (squares_T1.squeeze(1) / width + eps).rsqrt_()
    return (wide(x_TW) * rstd_T[:, None]).mul_(w_W).to(x_TW.dtype), rstd_T


def shared_rmsnorm_dgrad(dy_TW: Tensor, x_TW: Tensor, w_W: Tensor, rstd_T: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """dy_TW, x_TW, w_W, rstd_T -> dx_TW = dy·w·rstd, and dsquares_T1 = −rstd³ / (2·width) · Σ dy·w·x."""
    dx_TW = wide(dy_TW) * wide(w_W)
    dsquares_T = (dx_TW * x_TW).sum(dim=1) * rstd_T**3 / (-2 * width)
    return dx_TW.mul_(rstd_T[:, None]).to(x_TW.dtype), dsquares_T[:, None]


# --- The gradient of an RMSNorm fused with its neighbours: the sums that produce its dy, the recomputed norm itself,
# and the gradient of the residual stream
#
# T tokens, D columns, S = T·K rows, B tiles. Each equals the separate ops in sequence, and rounds where they do.
# `sum_`: dy is a + b. `permuted_`: dy is the result of `permute_dgrad_add`. `_again`: the norm's result, for weight
# gradients, and `rstd` are recomputed from `x`, and returned after dy; `_again_quantise`: that result is quantised in
# row tiles. dx + add is returned last.


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
    if runs_natively(a_TD, b_TD, x_TD, w_D, add_TD):
        return native.permuted_rmsnorm_dgrad_add(None, None, 0, a_TD, b_TD, x_TD, w_D, rstd_T, add_TD)
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
    """The arguments of `permute_dgrad_add`, x_TD, w_D, rstd_T, add_TD -> dy_TD, dx_TD + add_TD."""
    summed = (drows_SD, other_TD) if more_TD is None else (drows_SD, other_TD, more_TD)
    if runs_natively(*summed, x_TD, w_D, add_TD):
        return native.permuted_rmsnorm_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD, x_TD, w_D, rstd_T, add_TD)
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
    """The arguments of `permute_dgrad_add`, x_TD, w_D, add_TD -> dy_TD, y_TD, rstd_T, dx_TD + add_TD."""
    dy_TD = permute_dgrad_add(drows_SD, order_S, top_k, other_TD, more_TD)
    return dy_TD, *rmsnorm_again_dgrad_add(dy_TD, x_TD, w_D, eps, add_TD)


OPS = (
    rmsnorm,
    rmsnorm_dgrad,
    rmsnorm_wgrad,
    rmsnorm_wgrad_,
    add_rmsnorm,
    rmsnorm_dgrad_add,
    head_rmsnorm,
    head_rmsnorm_dgrad,
    head_rmsnorm_wgrad,
    head_rmsnorm_wgrad_,
    unweighted_rmsnorm,
    unweighted_rmsnorm_dgrad,
    rmsnorm_quantise,
    rmsnorm_quantise_wide,
    add_rmsnorm_quantise,
    add_rmsnorm_quantise_wide,
    two_squares,
    two_squares_dgrad,
    shared_rmsnorm,
    shared_rmsnorm_dgrad,
    rmsnorm_again_dgrad_add,
    rmsnorm_again_quantise_dgrad_add,
    sum_rmsnorm_dgrad_add,
    sum_rmsnorm_again_dgrad_add,
    sum_rmsnorm_again_quantise_dgrad_add,
    permuted_rmsnorm_dgrad_add,
    permuted_rmsnorm_again_dgrad_add,
)
