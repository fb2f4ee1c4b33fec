"""A factor of every element, a soft bound: cap·tanh(x / cap), and rows without their means."""

from __future__ import annotations

from compiler.model.ops.rule import Gradient, Rule, Tensor, elementwise


def _infer_scale(x_TN: Tensor, factor: float) -> tuple[Tensor, ...]:
    return (x_TN,)


def _infer_softcap(x_TN: Tensor, cap: float) -> tuple[Tensor, ...]:
    assert cap > 0, cap
    return (x_TN,)


SCALE = Rule(
    args=("x", "factor"),
    outputs=("y",),
    infer=_infer_scale,
    kernel_class="add",
    flops=elementwise("x", 1),
    dgrad=Gradient("scale_dgrad", reads=("d_y", "factor"), gives=("x",), flops=elementwise("d_y", 1)),
)

SOFTCAP = Rule(
    args=("x", "cap"),
    outputs=("y",),
    infer=_infer_softcap,
    kernel_class="add",
    flops=elementwise("x", 4),
    dgrad=Gradient("softcap_dgrad", reads=("d_y", "y", "cap"), gives=("x",), flops=elementwise("d_y", 4)),
)

CENTER = Rule(
    args=("x",),
    outputs=("y",),
    infer=lambda x_TN: (x_TN,),
    kernel_class="norm",
    flops=elementwise("x", 2),
    dgrad=Gradient("center_dgrad", reads=("d_y",), gives=("x",), flops=elementwise("d_y", 2)),
)

RULES = {"center": CENTER, "scale": SCALE, "softcap": SOFTCAP}
