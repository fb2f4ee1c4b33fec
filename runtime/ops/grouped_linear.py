"""Linear layers of several experts over the rows each received. R rows, K inputs, N outputs, E experts, G groups.

Rows offsets[g-1] … offsets[g] form group g and meet expert g mod E: a buffer received from several sources holds,
source after source, one group for each expert, and needs no second sort. R may be 0 and groups may be empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor


def _groups(offsets_G: Tensor, by_expert: Tensor, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Of every group with rows: its expert's slice of `by_expert`, and its rows of each of `by_row`."""
    ends = offsets_G.tolist()
    assert ends[-1] == by_row[0].shape[0], (ends, by_row[0].shape)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    rows = zip(*(tensor.split(sizes) for tensor in by_row), strict=True)
    for size, expert, of_group in zip(sizes, cycle(by_expert.unbind()), rows, strict=False):
        if size:
            yield (expert, *of_group)


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_G: Tensor) -> Tensor:
    """x_RK, w_ENK, offsets_G (int32, ascending, the last one R) -> y_RN."""
    y_RN = x_RK.new_empty((x_RK.shape[0], w_ENK.shape[1]))
    for w_NK, x_rK, y_rN in _groups(offsets_G, w_ENK, x_RK, y_RN):
        torch.mm(x_rK, w_NK.t(), out=y_rN)
    return y_RN


def grouped_linear_dgrad(dy_RN: Tensor, w_ENK: Tensor, offsets_G: Tensor) -> Tensor:
    """dy_RN, w_ENK, offsets_G -> dx_RK."""
    dx_RK = dy_RN.new_empty((dy_RN.shape[0], w_ENK.shape[2]))
    for w_NK, dy_rN, dx_rK in _groups(offsets_G, w_ENK, dy_RN, dx_RK):
        torch.mm(dy_rN, w_NK, out=dx_rK)
    return dx_RK


def grouped_linear_wgrad(dy_RN: Tensor, x_RK: Tensor, offsets_G: Tensor, num_experts: int) -> Tensor:
    """dy_RN, x_RK, offsets_G -> dw_ENK; zero for an expert without rows."""
    dw_ENK = x_RK.new_zeros((num_experts, dy_RN.shape[1], x_RK.shape[1]))
    grouped_linear_wgrad_(dw_ENK, dy_RN, x_RK, offsets_G)
    return dw_ENK


def grouped_linear_wgrad_(acc_ENK: Tensor, dy_RN: Tensor, x_RK: Tensor, offsets_G: Tensor) -> None:
    """acc_ENK += dw_ENK of (dy_RN, x_RK, offsets_G)."""
    for acc_NK, dy_rN, x_rK in _groups(offsets_G, acc_ENK, dy_RN, x_RK):
        acc_NK.addmm_(dy_rN.t(), x_rK)
