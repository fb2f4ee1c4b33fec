"""Linear layers: y = x·wᵀ and its two gradients, in BF16, wider, block-diagonal, and in FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import ops
from runtime.ops.native.library import runs_natively
from runtime.ops.product import add_product_, bf16_parts, product, product_, wide, wide_product

# --- y = x·wᵀ and its two gradients. T rows, K inputs, N outputs


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


# --- y = x·wᵀ with a block-diagonal w, and its two gradients: groups of columns, each with its own matrix
#
# DeepSeek-V4's grouped output projection, arXiv 2606.19348, §2.3.1. T rows, G groups of K inputs and N outputs. The
# blocks of w are stacked by rows. Each block is a separate product: there are only 8 or 16, and they are large.


def block_linear(x: Tensor, w: Tensor) -> Tensor:
    """x [T, G·K], w [G·N, K] -> y [T, G·N]."""
    groups = x.shape[1] // w.shape[1]
    y = x.new_empty((len(x), len(w)))
    for x_TK, w_NK, y_TN in zip(x.chunk(groups, 1), w.chunk(groups), y.chunk(groups, 1), strict=True):
        product_(y_TN, x_TK, w_NK.t())
    return y


def block_linear_dgrad(dy: Tensor, w: Tensor, columns: int) -> Tensor:
    """dy [T, G·N], w [G·N, K] -> dx [T, G·K]; `columns`: G·K."""
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


# --- A linear with FP32 outputs for BF16 inputs, for the logits of a router. T rows, K inputs, N outputs
#
# With the 8 significant bits of BF16 many experts would have equal scores, and a balancing bias that moves by 0.001
# would not change their order. A router has few columns, so FP32 costs little. In FP32 and FP64 this is `linear`.


def linear_wide(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x_TK, w_NK -> y_TN, at least FP32."""
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


# --- y = x·wᵀ of scaled E4M3 operands, and its two gradients. R rows, K inputs, N outputs, B tiles of 128
#
# As in arXiv 2412.19437, §3.3: products are summed over 128 columns at a time in FP32; each sum is multiplied by the
# scales of its two tiles and added in FP32; the total is rounded once, to BF16. A weight gradient sums over rows: its
# operands are transposed, with one scale per 128 rows (`quantise_columns`), and it adds to an FP32 buffer.
#
# An input gradient takes the transposed weight: every E4M3 product reads both operands along their rows.

TILE = 128


def linear_fp8(x_RK: Tensor, xs_RB: Tensor, w_NK: Tensor, ws: Tensor) -> Tensor:
    """x_RK, its scales, w_NK, its scales [N / 128, K / 128] -> y_RN (BF16)."""
    if runs_natively(x_RK, w_NK):
        return ops.linear_fp8(x_RK, xs_RB, w_NK, ws)
    return scaled_product(x_RK, xs_RB, w_NK, scales_by_row(ws, w_NK.shape[0])).to(torch.bfloat16)


def linear_fp8_dgrad(dy_RN: Tensor, dys_RB: Tensor, w_KN: Tensor, ws: Tensor) -> Tensor:
    """dy_RN, its scales, w_KN (transposed), its scales [K / 128, N / 128] -> dx_RK (BF16)."""
    return linear_fp8(dy_RN, dys_RB, w_KN, ws)


def linear_fp8_wgrad_(acc_NK: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor) -> None:
    """acc_NK (FP32) += dw_NK of (dy_NR, x_KR), both transposed, with scales of 128 rows."""
    if runs_natively(dy_NR, x_KR):
        return ops.linear_fp8_wgrad_(acc_NK, dy_NR, dys_NB, x_KR, xs_KB)
    acc_NK.add_(scaled_product(dy_NR, dys_NB, x_KR, xs_KB))


def scaled_product(
    a_MC: Tensor, as_MB: Tensor, b_NC: Tensor, bs_NB: Tensor, start: int = 0, end: int | None = None
) -> Tensor:
    """Return a·bᵀ (FP32) over the columns from start to end; each operand has one scale per row and 128 columns."""
    total_MN = torch.zeros((a_MC.shape[0], b_NC.shape[0]), dtype=torch.float32, device=a_MC.device)
    end = a_MC.shape[1] if end is None else end
    while start < end:
        tile = start // TILE
        stop = min(end, (tile + 1) * TILE)
        sums_MN = product(a_MC[:, start:stop].to(torch.float32), b_NC[:, start:stop].to(torch.float32).t())
        total_MN += sums_MN.mul_(as_MB[:, tile, None]).mul_(bs_NB[:, tile])
        start = stop
    return total_MN


def scales_by_row(scales: Tensor, rows: int) -> Tensor:
    """Expand the scales of tiles of 128 rows to one per row."""
    return scales.repeat_interleave(TILE, -2)[..., :rows, :]


OPS = (
    linear,
    linear_detached,
    linear_dgrad,
    linear_wgrad,
    linear_wgrad_,
    block_linear,
    block_linear_dgrad,
    block_linear_wgrad,
    block_linear_wgrad_,
    linear_wide,
    linear_wide_dgrad,
    linear_wide_wgrad,
    linear_wide_wgrad_,
    linear_fp8,
    linear_fp8_dgrad,
    linear_fp8_wgrad_,
)
