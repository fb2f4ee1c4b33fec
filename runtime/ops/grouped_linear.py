"""Grouped linear layers: each expert's weight applied to the rows it received, in BF16 and in FP8."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.ops.linear import linear_fp8, scaled_product
from runtime.ops.native import ops
from runtime.ops.native.library import multiplies_natively, runs_natively
from runtime.ops.product import add_product_, product, product_, uses_onednn, wide_dtype
from runtime.ops.quantise import TILE

# --- Grouped linear layers in BF16 and wider. R rows, K inputs, N outputs, E experts
#
# Rows offsets[e-1] … offsets[e] form the group of expert e. R may be 0 and groups may be empty.
#
# oneDNN compiles a kernel for every new shape, and the number of rows of an expert changes every time. So its products
# use few row counts: multiples of 8 up to 128, then eight per octave. The row layout does not change: a group's product
# may extend into the rows of the next group, whose own product then overwrites them. Weight gradients never use oneDNN:
# they are added in FP32.


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """x_RK, w_ENK, offsets_E (int32, ascending, the last one R) -> y_RN."""
    if _runs_natively(x_RK, w_ENK):
        return ops.grouped_linear(x_RK, w_ENK, offsets_E)
    y_RN = x_RK.new_empty((x_RK.shape[0], w_ENK.shape[1]))
    for w_NK, start, end in _groups(offsets_E, w_ENK, x_RK.shape[0]):
        _product_of_rows(y_RN, x_RK, w_NK.t(), start, end)
    return y_RN


def grouped_linear_dgrad(dy_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """dy_RN, w_ENK, offsets_E -> dx_RK."""
    if _runs_natively(dy_RN, w_ENK):
        return ops.grouped_linear_dgrad(dy_RN, w_ENK, offsets_E)
    dx_RK = dy_RN.new_empty((dy_RN.shape[0], w_ENK.shape[2]))
    for w_NK, start, end in _groups(offsets_E, w_ENK, dy_RN.shape[0]):
        _product_of_rows(dx_RK, dy_RN, w_NK, start, end)
    return dx_RK


def grouped_linear_wgrad(dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor, num_experts: int) -> Tensor:
    """dy_RN, x_RK, offsets_E -> dw_ENK; zero for an expert without rows."""
    dw_ENK = x_RK.new_zeros((num_experts, dy_RN.shape[1], x_RK.shape[1]), dtype=wide_dtype(x_RK.dtype))
    grouped_linear_wgrad_(dw_ENK, dy_RN, x_RK, offsets_E)
    return dw_ENK.to(x_RK.dtype)


def grouped_linear_wgrad_(acc_ENK: Tensor, dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> None:
    """acc_ENK += dw_ENK of (dy_RN, x_RK, offsets_E)."""
    if _runs_natively(dy_RN, x_RK):
        return ops.grouped_linear_wgrad_(acc_ENK, dy_RN, x_RK, offsets_E)
    for acc_NK, start, end in _groups(offsets_E, acc_ENK, x_RK.shape[0]):
        add_product_(acc_NK, dy_RN[start:end].t(), x_RK[start:end])


# ---------------------------------------------------------------- groups
def _groups(offsets_E: Tensor, by_expert: Tensor, num_rows: int) -> Iterator[tuple[Tensor, int, int]]:
    """Yield, for each group with rows, its slice of `by_expert`, its first row, and the row after its last."""
    ends = offsets_E.tolist()
    assert ends[-1] == num_rows, (ends, num_rows)
    for start, end, expert in zip([0, *ends[:-1]], ends, by_expert.unbind(), strict=True):
        if start < end:
            yield expert, start, end


def _runs_natively(*operands: Tensor) -> bool:
    """Return whether the products of all groups run in one call of C++."""
    return runs_natively(*operands) and multiplies_natively(operands[0], operands[0])


def _size(a: Tensor, b: Tensor, rows: int) -> int:
    """Return the row count to use for a product of `rows` rows of such operands."""
    if not uses_onednn(a, b):
        return rows
    step = 8
    while rows > 16 * step:
        step *= 2
    return -(-rows // step) * step


def _product_of_rows(out_RN: Tensor, x_RK: Tensor, b_KN: Tensor, start: int, end: int) -> None:
    """Write rows start to end of x·b into those of `out`. May overwrite later rows of `out`, too."""
    size = _size(x_RK, b_KN, end - start)
    if start + size <= x_RK.shape[0]:
        product_(out_RN[start : start + size], x_RK[start : start + size], b_KN)
    else:
        out_RN[start:end] = product(_pad_rows(x_RK[start:end], size), b_KN)[: end - start]


def _pad_rows(x_rK: Tensor, size: int) -> Tensor:
    """Return x padded with rows of zeros up to `size`."""
    padded = x_rK.new_empty((size, x_rK.shape[1]))
    padded[: x_rK.shape[0]] = x_rK
    padded[x_rK.shape[0] :] = 0
    return padded


# --- Grouped `linear_fp8`. R rows, K in, N out, E experts, B tiles
#
# Rows offsets[e-1] … offsets[e] are those of expert e, as in `grouped_linear`. The column tiles that a weight gradient
# reads are counted from the first row of the whole buffer. The exchange between experts pads each expert's rows to
# start at a multiple of 128 (runtime/comm/transport.py), so no tile spans two experts.


def grouped_linear_fp8(x_RK: Tensor, xs_RB: Tensor, w_ENK: Tensor, ws: Tensor, offsets_E: Tensor) -> Tensor:
    """x_RK, its scales, w_ENK, its scales [E, N / 128, K / 128], offsets_E (int32) -> y_RN (BF16)."""
    if runs_natively(x_RK, w_ENK):
        return ops.linear_fp8(x_RK, xs_RB, w_ENK, ws, offsets_E)
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
    if runs_natively(dy_NR, x_KR):
        return ops.linear_fp8_wgrad_(acc_ENK, dy_NR, dys_NB, x_KR, xs_KB, offsets_E)
    for expert, start, end in groups(offsets_E, acc_ENK.shape[0], x_KR.shape[1]):
        acc_ENK[expert] += scaled_product(dy_NR, dys_NB, x_KR, xs_KB, start, end)


def groups(offsets_E: Tensor, num_experts: int, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield, for each expert with rows, its index, its first row, and the row after its last."""
    ends = offsets_E.tolist()
    assert len(ends) == num_experts and ends[-1] == num_rows, (ends, num_experts, num_rows)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start < end:
            yield expert, start, end


OPS = (
    grouped_linear,
    grouped_linear_dgrad,
    grouped_linear_wgrad,
    grouped_linear_wgrad_,
    grouped_linear_fp8,
    grouped_linear_fp8_dgrad,
    grouped_linear_fp8_wgrad_,
)
