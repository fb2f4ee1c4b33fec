"""Biases: a number added to each column, either the same for all rows or that of each row's expert.

T rows, N columns · R rows that E experts received: rows offsets[e-1] … offsets[e] are those of expert e. Which expert a
row belongs to is looked up, so the host need not know how many rows each has. For BF16, sums over rows are FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.product import wide, wide_dtype


def add_bias(x_TN: Tensor, b_N: Tensor) -> Tensor:
    """x_TN, b_N -> y_TN = x + b. `x` may be a view of columns."""
    return (x_TN + b_N).contiguous()


def add_bias_wgrad(dy_TN: Tensor) -> Tensor:
    """dy_TN -> db_N = Σ_t dy."""
    return dy_TN.sum(dim=0, dtype=wide_dtype(dy_TN.dtype)).to(dy_TN.dtype)


def add_bias_wgrad_(acc_N: Tensor, dy_TN: Tensor) -> None:
    """acc_N += db_N of dy_TN."""
    acc_N.add_(dy_TN.sum(dim=0, dtype=wide_dtype(dy_TN.dtype)))


def add_grouped_bias(x_RN: Tensor, b_EN: Tensor, offsets_E: Tensor, gate_R: Tensor | None) -> Tensor:
    """x_RN, b_EN, offsets_E (int32, ascending, the last one R), gate_R or none -> x + gate·b of each row's expert."""
    b_RN = b_EN[_experts(offsets_E, x_RN.shape[0])]
    weighed_RN = b_RN if gate_R is None else wide(gate_R)[:, None] * wide(b_RN)
    return (x_RN + weighed_RN).to(x_RN.dtype).contiguous()


def add_grouped_bias_dgrad(dy_RN: Tensor, b_EN: Tensor, offsets_E: Tensor) -> Tensor:
    """dy_RN, b_EN, offsets_E -> dgate_R = dy·b of each row's expert."""
    return (wide(dy_RN) * wide(b_EN)[_experts(offsets_E, dy_RN.shape[0])]).sum(dim=1)


def add_grouped_bias_wgrad(dy_RN: Tensor, offsets_E: Tensor, gate_R: Tensor | None, num_experts: int) -> Tensor:
    """dy_RN, offsets_E, gate_R or none -> db_EN = Σ gate·dy over the rows of each expert."""
    db_EN = dy_RN.new_zeros((num_experts, dy_RN.shape[1]), dtype=wide_dtype(dy_RN.dtype))
    add_grouped_bias_wgrad_(db_EN, dy_RN, offsets_E, gate_R)
    return db_EN.to(dy_RN.dtype)


def add_grouped_bias_wgrad_(acc_EN: Tensor, dy_RN: Tensor, offsets_E: Tensor, gate_R: Tensor | None = None) -> None:
    """acc_EN += db_EN of (dy_RN, offsets_E, gate_R). A matrix product, so the order of the sum is fixed on every
    device."""
    experts_E1 = torch.arange(acc_EN.shape[0], device=dy_RN.device)[:, None]
    share_ER = (_experts(offsets_E, dy_RN.shape[0]) == experts_E1).to(wide_dtype(dy_RN.dtype))
    acc_EN.add_((share_ER if gate_R is None else share_ER * wide(gate_R)) @ wide(dy_RN))


def _experts(offsets_E: Tensor, num_rows: int) -> Tensor:
    """Return the expert of each row, [R]."""
    rows_R = torch.arange(num_rows, dtype=offsets_E.dtype, device=offsets_E.device)
    return torch.searchsorted(offsets_E, rows_R, right=True)


OPS = (
    *(add_bias, add_bias_wgrad, add_bias_wgrad_),
    *(add_grouped_bias, add_grouped_bias_dgrad, add_grouped_bias_wgrad, add_grouped_bias_wgrad_),
)
