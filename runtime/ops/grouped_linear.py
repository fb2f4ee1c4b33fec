"""Linear layers of several experts over the rows each received. R rows, K inputs, N outputs, E experts, G groups.

Rows offsets[g-1] … offsets[g] form group g and meet expert g mod E: a buffer received from several sources holds,
source after source, one group for each expert, and needs no second sort. R may be 0 and groups may be empty.

In BF16 the products are of multiples of 8 rows. A product by any other number is slower, and a new number costs the
making of a kernel. Rows need not lie otherwise for it: a group's product runs on into the rows of the next group, whose
own product overwrites what it left there; weight gradients add the last few rows in FP32. Milliseconds for 8,192 rows
of 16 experts in random shares, hidden 256, inner 128 (up, then down), one core with BF16 instructions; of 60 calls, no
two of the same numbers of rows, and in brackets of 60 more, when most kernels had been made:

                      plain          multiples of 8     FP32
    forward     6.3 (3.8)  4.0 (2.4)  3.0 (2.9)  1.8 (1.6)  11.2  5.9
    wgrad       8.1 (4.9)  5.9 (3.3)  4.0 (3.8)  2.4 (2.3)  10.8  5.8

FP32 gains nothing by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor

from runtime.ops.linear import add_product_
from runtime.ops.wide import wide, wide_dtype

ALIGNED = 8  # rows


def _groups(offsets_G: Tensor, by_expert: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of every group with rows: its expert's slice of `by_expert`, and its rows of each of `by_row`."""
    for expert, start, end in _bounds(offsets_G, by_expert, by_row[0].shape[0]):
        yield (expert, *(tensor[start:end] for tensor in by_row))


def _bounds(offsets_G: Tensor, by_expert: Tensor, num_rows: int) -> Iterator[tuple[Tensor, int, int]]:
    """Of every group with rows: its expert's slice of `by_expert`, its first row, and the row behind its last."""
    ends = offsets_G.tolist()
    assert ends[-1] == num_rows, (ends, num_rows)
    for start, end, expert in zip([0, *ends], ends, cycle(by_expert.unbind()), strict=False):
        if start < end:
            yield expert, start, end


def _aligned(offsets_G: Tensor, by_expert: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """As `_groups`, in pieces to be written in this order: a piece may run on into rows that come after it."""
    R = by_row[0].shape[0]
    for expert, start, end in _bounds(offsets_G, by_expert, R):
        size = -(-(end - start) // ALIGNED) * ALIGNED
        if start + size <= R:
            pieces = [(start, start + size)]
        else:  # no rows to run on into
            whole = start + size - ALIGNED
            pieces = [(start, whole), (whole, end)]
        yield from ((expert, *(tensor[low:high] for tensor in by_row)) for low, high in pieces if low < high)


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_G: Tensor) -> Tensor:
    """x_RK, w_ENK, offsets_G (int32, ascending, the last one R) -> y_RN."""
    y_RN = x_RK.new_empty((x_RK.shape[0], w_ENK.shape[1]))
    pieces = _aligned if x_RK.dtype == torch.bfloat16 else _groups
    for w_NK, x_rK, y_rN in pieces(offsets_G, w_ENK, x_RK, y_RN):
        torch.mm(x_rK, w_NK.t(), out=y_rN)
    return y_RN


def grouped_linear_dgrad(dy_RN: Tensor, w_ENK: Tensor, offsets_G: Tensor) -> Tensor:
    """dy_RN, w_ENK, offsets_G -> dx_RK."""
    dx_RK = dy_RN.new_empty((dy_RN.shape[0], w_ENK.shape[2]))
    pieces = _aligned if dy_RN.dtype == torch.bfloat16 else _groups
    for w_NK, dy_rN, dx_rK in pieces(offsets_G, w_ENK, dy_RN, dx_RK):
        torch.mm(dy_rN, w_NK, out=dx_rK)
    return dx_RK


def grouped_linear_wgrad(dy_RN: Tensor, x_RK: Tensor, offsets_G: Tensor, num_experts: int) -> Tensor:
    """dy_RN, x_RK, offsets_G -> dw_ENK; zero for an expert without rows."""
    dw_ENK = x_RK.new_zeros((num_experts, dy_RN.shape[1], x_RK.shape[1]), dtype=wide_dtype(x_RK.dtype))
    grouped_linear_wgrad_(dw_ENK, dy_RN, x_RK, offsets_G)
    return dw_ENK.to(x_RK.dtype)


def grouped_linear_wgrad_(acc_ENK: Tensor, dy_RN: Tensor, x_RK: Tensor, offsets_G: Tensor) -> None:
    """acc_ENK += dw_ENK of (dy_RN, x_RK, offsets_G)."""
    for acc_NK, dy_rN, x_rK in _groups(offsets_G, acc_ENK, dy_RN, x_RK):
        if x_RK.dtype == torch.bfloat16:
            whole = x_rK.shape[0] // ALIGNED * ALIGNED
            if whole:
                add_product_(acc_NK, dy_rN[:whole].t(), x_rK[:whole])
            if whole < x_rK.shape[0]:
                acc_NK.addmm_(wide(dy_rN[whole:]).t(), wide(x_rK[whole:]))
        else:
            acc_NK.addmm_(dy_rN.t(), x_rK)
