"""A bias of every column: y = x + b. T rows, N columns. Its sums over rows are FP32 beside BF16."""

from __future__ import annotations

from torch import Tensor

from runtime.ops.wide import wide_dtype


def bias(x_TN: Tensor, b_N: Tensor) -> Tensor:
    """x_TN, b_N -> y_TN. `x` may be a view of columns."""
    return (x_TN + b_N).contiguous()


def bias_wgrad(dy_TN: Tensor) -> Tensor:
    """dy_TN -> db_N = Σ_t dy."""
    return dy_TN.sum(dim=0, dtype=wide_dtype(dy_TN.dtype)).to(dy_TN.dtype)


def bias_wgrad_(acc_N: Tensor, dy_TN: Tensor) -> None:
    """acc_N += db_N of dy_TN."""
    acc_N.add_(dy_TN.sum(dim=0, dtype=wide_dtype(dy_TN.dtype)))


OPS = (bias, bias_wgrad, bias_wgrad_)
