"""SwiGLU: silu(gate)·up of [gate | up] columns, and the same times the gate weight of each row."""

from __future__ import annotations

from compiler.ops.rule import Gradient, Rule, Tensor, elementwise


def _infer(h_TM: Tensor) -> tuple[Tensor, ...]:
    assert h_TM.shape[1] % 2 == 0, h_TM
    return (Tensor((h_TM.shape[0], h_TM.shape[1] // 2), h_TM.dtype),)


def _infer_gated(h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    assert h_RM.shape[:1] == gate_R.shape, (h_RM, gate_R)
    return _infer(h_RM)


SWIGLU = Rule(
    args=("h",),
    outputs=("y",),
    infer=_infer,
    kernel_class="swiglu",
    flops=elementwise("h", 3),
    dgrad=Gradient("swiglu_dgrad", reads=("d_y", "h"), gives=("h",), flops=elementwise("h", 5)),
)

GATED_SWIGLU = Rule(
    args=("h", "gate"),
    outputs=("y",),
    infer=_infer_gated,
    kernel_class="swiglu",
    flops=elementwise("h", 4),
    dgrad=Gradient("gated_swiglu_dgrad", reads=("d_y", "h", "gate"), gives=("h", "gate"), flops=elementwise("h", 7)),
)

RULES = {"swiglu": SWIGLU, "gated_swiglu": GATED_SWIGLU}
