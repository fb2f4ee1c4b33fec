"""y = x·wᵀ of operands in E4M3 with scales, and its two gradients. R rows, K inputs, N outputs, B tiles of 128.

As arXiv 2412.19437 has it, §3.3: sums of 128 products, exact but for FP32's rounding, each times the scales of its two
tiles, are added up in FP32, and the total is rounded once, to BF16. In a weight gradient rows are what is summed over:
its operands come transposed, with scales of 128 rows (`quantise_columns`), and it adds to an FP32 buffer.

Weights come transposed for an input gradient: such a product, like all in E4M3, reads both operands along their rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import fp8 as native
from runtime.ops.native.library import takes
from runtime.ops.product import product

TILE = 128


def linear_fp8(x_RK: Tensor, xs_RB: Tensor, w_NK: Tensor, ws: Tensor) -> Tensor:
    """x_RK, its scales, w_NK, its scales [N / 128, K / 128] -> y_RN (BF16)."""
    if takes(x_RK, w_NK):
        return native.linear_fp8(x_RK, xs_RB, w_NK, ws)
    return scaled_product(x_RK, xs_RB, w_NK, by_row(ws, w_NK.shape[0])).to(torch.bfloat16)


def linear_fp8_dgrad(dy_RN: Tensor, dys_RB: Tensor, w_KN: Tensor, ws: Tensor) -> Tensor:
    """dy_RN, its scales, w_KN (transposed), its scales [K / 128, N / 128] -> dx_RK (BF16)."""
    return linear_fp8(dy_RN, dys_RB, w_KN, ws)


def linear_fp8_wgrad_(acc_NK: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor) -> None:
    """acc_NK (FP32) += dw_NK of (dy_NR, x_KR), both transposed, with scales of 128 rows."""
    if takes(dy_NR, x_KR):
        return native.linear_fp8_wgrad_(acc_NK, dy_NR, dys_NB, x_KR, xs_KB)
    acc_NK.add_(scaled_product(dy_NR, dys_NB, x_KR, xs_KB))


def scaled_product(
    a_MC: Tensor, as_MB: Tensor, b_NC: Tensor, bs_NB: Tensor, start: int = 0, end: int | None = None
) -> Tensor:
    """a·bᵀ (FP32) over the columns from start to end, each operand with a scale for a row and a tile of 128 columns."""
    total_MN = torch.zeros((a_MC.shape[0], b_NC.shape[0]), dtype=torch.float32, device=a_MC.device)
    end = a_MC.shape[1] if end is None else end
    while start < end:
        tile = start // TILE
        stop = min(end, (tile + 1) * TILE)
        sums_MN = product(a_MC[:, start:stop].to(torch.float32), b_NC[:, start:stop].to(torch.float32).t())
        total_MN += sums_MN.mul_(as_MB[:, tile, None]).mul_(bs_NB[:, tile])
        start = stop
    return total_MN


def by_row(scales: Tensor, rows: int) -> Tensor:
    """Scales of tiles of 128 rows -> of rows."""
    return scales.repeat_interleave(TILE, -2)[..., :rows, :]


OPS = (linear_fp8, linear_fp8_dgrad, linear_fp8_wgrad_)
