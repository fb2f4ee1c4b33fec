"""RMSNorm of rows, and of the heads in a row. `x` may be a view of columns; `rstd`, one number for each row or head, is
kept for the backward."""

from __future__ import annotations

from compiler.ops.rule import Gradient, Rule, Tensor, elementwise, statistics_dtype


def _infer(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    assert x_TD.shape[1:] == w_D.shape, (x_TD, w_D)
    return x_TD, Tensor(x_TD.shape[:1], statistics_dtype(x_TD.dtype))


def _infer_heads(x_TW: Tensor, w_C: Tensor, eps: float) -> tuple[Tensor, ...]:
    (T, W), (C,) = x_TW.shape, w_C.shape
    assert W % C == 0, (x_TW, w_C)
    return x_TW, Tensor((T, W // C), statistics_dtype(x_TW.dtype))


RMSNORM = Rule(
    args=("x", "w", "eps"),
    outputs=("y", "rstd"),
    hidden=1,
    infer=_infer,
    kernel_class="norm",
    flops=elementwise("x", 4),
    dgrad=Gradient("rmsnorm_dgrad", reads=("d_y", "x", "w", "rstd"), gives=("x",), flops=elementwise("x", 8)),
    wgrad=Gradient("rmsnorm_wgrad", reads=("d_y", "x", "rstd"), gives=("w",), flops=elementwise("x", 3)),
)

HEAD_RMSNORM = Rule(
    args=("x", "w", "eps"),
    outputs=("y", "rstd"),
    hidden=1,
    infer=_infer_heads,
    kernel_class="norm",
    flops=elementwise("x", 4),
    dgrad=Gradient("head_rmsnorm_dgrad", reads=("d_y", "x", "w", "rstd"), gives=("x",), flops=elementwise("x", 8)),
    wgrad=Gradient("head_rmsnorm_wgrad", reads=("d_y", "x", "rstd"), gives=("w",), flops=elementwise("x", 3)),
)

RULES = {"rmsnorm": RMSNORM, "head_rmsnorm": HEAD_RMSNORM}
