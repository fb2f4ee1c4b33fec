"""RMSNorm. `x` may be a view of columns; `rstd`, one number a row, is kept for the backward."""

from __future__ import annotations

from compiler.oprules.rule import Gradient, Rule, Tensor, elementwise, statistics_dtype


def _infer(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    assert x_TD.shape[1:] == w_D.shape, (x_TD, w_D)
    return x_TD, Tensor(x_TD.shape[:1], statistics_dtype(x_TD.dtype))


RMSNORM = Rule(
    args=("x", "w", "eps"),
    outputs=("y", "rstd"),
    hidden=1,
    infer=_infer,
    flops=elementwise("x", 4),
    dgrad=Gradient("rmsnorm_dgrad", reads=("d_y", "x", "w", "rstd"), gives=("x",), flops=elementwise("x", 8)),
    wgrad=Gradient("rmsnorm_wgrad", reads=("d_y", "x", "rstd"), gives=("w",), flops=elementwise("x", 3)),
)
