"""Activations between up and down. With a gate, of [gate | up] columns: act(gate)·up. Without one, of each column."""

from __future__ import annotations

from compiler.model.ops.rule import Gradient, Rule, Tensor, elementwise


def _infer(h_TM: Tensor) -> tuple[Tensor, ...]:
    assert h_TM.shape[1] % 2 == 0, h_TM
    return (Tensor((h_TM.shape[0], h_TM.shape[1] // 2), h_TM.dtype),)


def _infer_gated(h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    assert h_RM.shape[:1] == gate_R.shape, (h_RM, gate_R)
    return _infer(h_RM)


def _infer_clamped(h_TM: Tensor, limit: float, alpha: float, shift: float) -> tuple[Tensor, ...]:
    assert limit > 0 and alpha > 0, (limit, alpha)
    return _infer(h_TM)


def _infer_plain(h_TI: Tensor) -> tuple[Tensor, ...]:
    return (h_TI,)


def _infer_rows(x_RI: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    assert x_RI.shape[:1] == gate_R.shape, (x_RI, gate_R)
    return (x_RI,)


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

CLAMPED_SWIGLU = Rule(
    args=("h", "limit", "alpha", "shift"),
    outputs=("y",),
    infer=_infer_clamped,
    kernel_class="swiglu",
    flops=elementwise("h", 5),
    dgrad=Gradient(
        "clamped_swiglu_dgrad",
        reads=("d_y", "h", "limit", "alpha", "shift"),
        gives=("h",),
        flops=elementwise("h", 8),
    ),
)

GATE_ROWS = Rule(
    args=("x", "gate"),
    outputs=("y",),
    infer=_infer_rows,
    kernel_class="add",
    flops=elementwise("x", 1),
    dgrad=Gradient("gate_rows_dgrad", reads=("d_y", "x", "gate"), gives=("x", "gate"), flops=elementwise("x", 3)),
)


def _infer_columns(x_TN: Tensor, z_TN: Tensor, silu: bool) -> tuple[Tensor, ...]:
    assert x_TN == z_TN, (x_TN, z_TN)
    return (x_TN,)


GATE_COLUMNS = Rule(
    args=("x", "z", "silu"),
    outputs=("y",),
    infer=_infer_columns,
    kernel_class="swiglu",
    flops=elementwise("x", 3),
    dgrad=Gradient("gate_columns_dgrad", reads=("d_y", "x", "z", "silu"), gives=("x", "z"), flops=elementwise("x", 6)),
)


def _rule(op: str, *, gated: bool, flops: int) -> Rule:
    """The rule of an activation without constants. FLOPs are those of an element of `h`."""
    return Rule(
        args=("h",),
        outputs=("y",),
        infer=_infer if gated else _infer_plain,
        kernel_class="swiglu",
        flops=elementwise("h", flops),
        dgrad=Gradient(f"{op}_dgrad", reads=("d_y", "h"), gives=("h",), flops=elementwise("h", 2 * flops)),
    )


RULES = {
    "swiglu": SWIGLU,
    "gated_swiglu": GATED_SWIGLU,
    "clamped_swiglu": CLAMPED_SWIGLU,
    "gate_columns": GATE_COLUMNS,
    "gate_rows": GATE_ROWS,
    "geglu": _rule("geglu", gated=True, flops=4),
    "geglu_tanh": _rule("geglu_tanh", gated=True, flops=4),
    "gelu": _rule("gelu", gated=False, flops=6),
    "gelu_tanh": _rule("gelu_tanh", gated=False, flops=6),
    "relu2": _rule("relu2", gated=False, flops=2),
}
