"""RMSNorm of rows, and of the heads in a row, with or without a gain. `x` may be a view of columns. `rstd`, one number
per row or head, is saved for the backward. Where the columns of rows are sharded over ranks, each rank norms its own
columns by the sum over ranks of the `squares` that `two_squares` returns."""

from __future__ import annotations

from compiler.model.ops.rule import Gradient, Rule, Tensor, elementwise, statistics_dtype


def _infer(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    assert x_TD.shape[1:] == w_D.shape, (x_TD, w_D)
    return x_TD, Tensor(x_TD.shape[:1], statistics_dtype(x_TD.dtype))


def _infer_heads(x_TW: Tensor, w_C: Tensor, eps: float) -> tuple[Tensor, ...]:
    (T, W), (C,) = x_TW.shape, w_C.shape
    assert W % C == 0, (x_TW, w_C)
    return x_TW, Tensor((T, W // C), statistics_dtype(x_TW.dtype))


def _infer_unweighted(x: Tensor, heads: int, eps: float) -> tuple[Tensor, ...]:
    T, W = x.shape
    assert W % heads == 0, (x, heads)
    return x, Tensor((T, heads), statistics_dtype(x.dtype))


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

UNWEIGHTED_RMSNORM = Rule(
    args=("x", "heads", "eps"),
    outputs=("y", "rstd"),
    hidden=1,
    infer=_infer_unweighted,
    kernel_class="norm",
    flops=elementwise("x", 3),
    dgrad=Gradient("unweighted_rmsnorm_dgrad", reads=("d_y", "x", "rstd"), gives=("x",), flops=elementwise("x", 6)),
)


def _infer_squares(x_TW: Tensor, first: int, second: int) -> tuple[Tensor, ...]:
    T, W = x_TW.shape
    assert first + second <= W, (x_TW, first, second)
    return (Tensor((T, 2), statistics_dtype(x_TW.dtype)),)


def _infer_shared(x_TW: Tensor, w_W: Tensor, squares_T1: Tensor, width: int, eps: float) -> tuple[Tensor, ...]:
    assert x_TW.shape[1:] == w_W.shape and squares_T1.shape == (x_TW.shape[0], 1), (x_TW, w_W, squares_T1)
    return x_TW, Tensor(x_TW.shape[:1], squares_T1.dtype)


TWO_SQUARES = Rule(
    args=("x", "first", "second"),
    outputs=("squares",),
    infer=_infer_squares,
    kernel_class="norm",
    flops=elementwise("x", 2),
    differentiable=("squares",),
    dgrad=Gradient(
        "two_squares_dgrad",
        reads=("d_squares", "x", "first", "second"),
        gives=("x",),
        flops=elementwise("x", 2),
    ),
)

SHARED_RMSNORM = Rule(
    args=("x", "w", "squares", "width", "eps"),
    outputs=("y", "rstd"),
    hidden=1,
    infer=_infer_shared,
    kernel_class="norm",
    flops=elementwise("x", 2),
    dgrad=Gradient(
        "shared_rmsnorm_dgrad",
        reads=("d_y", "x", "w", "rstd", "width"),
        gives=("x", "squares"),
        flops=elementwise("x", 4),
    ),
    wgrad=Gradient("rmsnorm_wgrad", reads=("d_y", "x", "rstd"), gives=("w",), flops=elementwise("x", 3)),
)

RULES = {
    "rmsnorm": RMSNORM,
    "head_rmsnorm": HEAD_RMSNORM,
    "two_squares": TWO_SQUARES,
    "shared_rmsnorm": SHARED_RMSNORM,
    "unweighted_rmsnorm": UNWEIGHTED_RMSNORM,
}
