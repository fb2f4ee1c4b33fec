"""`linear_fp8` of several experts over the rows each received. R rows, K in, N out, E experts, B tiles.

Rows offsets[e-1] … offsets[e] are those of expert e, as in `grouped_linear`. Tiles of columns, which a weight gradient
reads, run over the rows of the whole buffer. The rows of an expert begin at a multiple of 128, as the exchange between
experts pads them (runtime/comm/rows.py): no tile is of two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.ops.linear_fp8 import linear_fp8, scaled_product
from runtime.ops.native import fp8 as native
from runtime.ops.native.library import takes
from runtime.ops.quantise import TILE


def grouped_linear_fp8(x_RK: Tensor, xs_RB: Tensor, w_ENK: Tensor, ws: Tensor, offsets_E: Tensor) -> Tensor:
    """x_RK, its scales, w_ENK, its scales [E, N / 128, K / 128], offsets_E (int32) -> y_RN (BF16)."""
    if takes(x_RK, w_ENK):
        return native.linear_fp8(x_RK, xs_RB, w_ENK, ws, offsets_E)
    y_RN = torch.empty((x_RK.shape[0], w_ENK.shape[1]), dtype=torch.bfloat16, device=x_RK.device)
    for expert, start, end in groups(offsets_E, w_ENK.shape[0], x_RK.shape[0]):
        y_RN[start:end] = linear_fp8(x_RK[start:end], xs_RB[start:end], w_ENK[expert], ws[expert])
    return y_RN


def grouped_linear_fp8_dgrad(dy_RN: Tensor, dys_RB: Tensor, w_EKN: Tensor, ws: Tensor, offsets_E: Tensor) -> Tensor:
    """dy_RN, its scales, w_EKN (transposed), its scales [E, K / 128, N / 128], offsets_E -> dx_RK (BF16)."""
    return grouped_linear_fp8(dy_RN, dys_RB, w_EKN, ws, offsets_E)


def grouped_linear_fp8_wgrad_(
    acc_ENK: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor, offsets_E: Tensor
) -> None:
    """acc_ENK (FP32) += dw_ENK of (dy_NR, x_KR), both transposed, with scales of 128 rows. Every offset is a multiple
    of 128."""
    assert offsets_E.shape == acc_ENK.shape[:1] and not (offsets_E % TILE).any(), offsets_E
    if takes(dy_NR, x_KR):
        return native.linear_fp8_wgrad_(acc_ENK, dy_NR, dys_NB, x_KR, xs_KB, offsets_E)
    for expert, start, end in groups(offsets_E, acc_ENK.shape[0], x_KR.shape[1]):
        acc_ENK[expert] += scaled_product(dy_NR, dys_NB, x_KR, xs_KB, start, end)


def groups(offsets_E: Tensor, num_experts: int, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Experts that have rows: which, the first row, and the row after the last."""
    ends = offsets_E.tolist()
    assert len(ends) == num_experts and ends[-1] == num_rows, (ends, num_experts, num_rows)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start < end:
            yield expert, start, end


OPS = (grouped_linear_fp8, grouped_linear_fp8_dgrad, grouped_linear_fp8_wgrad_)
