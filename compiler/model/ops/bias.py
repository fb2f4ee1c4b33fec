"""Biases: a number added to each column, of one product, or of the products of many experts."""

from __future__ import annotations

from compiler.model.ops.rule import Extent, Gradient, Rule, Tensor, elementwise


def _infer(x_TN: Tensor, b_N: Tensor) -> tuple[Tensor, ...]:
    assert x_TN.shape[1:] == b_N.shape, (x_TN, b_N)
    return (x_TN,)


def _infer_grouped(x_RN: Tensor, b_EN: Tensor, offsets_E: Tensor, gate_R: Tensor | None) -> tuple[Tensor, ...]:
    assert x_RN.shape[1:] == b_EN.shape[1:] and offsets_E.shape == b_EN.shape[:1], (x_RN, b_EN, offsets_E)
    assert gate_R is None or gate_R.shape == x_RN.shape[:1], (x_RN, gate_R)
    return (x_RN,)


BIAS = Rule(
    args=("x", "b"),
    outputs=("y",),
    infer=_infer,
    kernel_class="add",
    flops=elementwise("x", 1),
    dgrad=Gradient("", reads=("d_y",), gives=("x",)),
    wgrad=Gradient("add_bias_wgrad", reads=("d_y",), gives=("b",), flops=elementwise("d_y", 1)),
)

GROUPED_BIAS = Rule(
    args=("x", "b", "offsets", "gate"),
    outputs=("y",),
    infer=_infer_grouped,
    kernel_class="add",
    flops=elementwise("x", 2),
    dgrad=Gradient("", reads=("d_y",), gives=("x",)),
    apart=Gradient(
        "add_grouped_bias_dgrad", reads=("d_y", "b", "offsets"), gives=("gate",), flops=elementwise("d_y", 2)
    ),
    wgrad=Gradient(
        "add_grouped_bias_wgrad",
        reads=("d_y", "offsets", "gate", Extent("b", 0)),
        gives=("b",),
        flops=elementwise("d_y", 2),
    ),
)

RULES = {"add_bias": BIAS, "add_grouped_bias": GROUPED_BIAS}
