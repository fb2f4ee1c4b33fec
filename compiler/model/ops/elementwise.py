"""Elementwise and column ops: activations, biases, scaling and softcap, sums, concatenation and splitting."""

from __future__ import annotations

from compiler.model.ops.rule import Extent, Gradient, Rule, Tensor, elementwise


# --- Activations between up and down. Gated ones take [gate | up] columns: act(gate)·up. Others act on each column
def _infer_activation(h_TM: Tensor) -> tuple[Tensor, ...]:
    assert h_TM.shape[1] % 2 == 0, h_TM
    return (Tensor((h_TM.shape[0], h_TM.shape[1] // 2), h_TM.dtype),)


def _infer_gated(h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    assert h_RM.shape[:1] == gate_R.shape, (h_RM, gate_R)
    return _infer_activation(h_RM)


def _infer_clamped(h_TM: Tensor, limit: float, alpha: float, shift: float) -> tuple[Tensor, ...]:
    assert limit > 0 and alpha > 0, (limit, alpha)
    return _infer_activation(h_TM)


def _infer_plain(h_TI: Tensor) -> tuple[Tensor, ...]:
    return (h_TI,)


def _infer_rows(x_RI: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    assert x_RI.shape[:1] == gate_R.shape, (x_RI, gate_R)
    return (x_RI,)


SWIGLU = Rule(
    args=("h",),
    outputs=("y",),
    infer=_infer_activation,
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
    """The rule of an activation without constants. `flops`: per element of `h`."""
    return Rule(
        args=("h",),
        outputs=("y",),
        infer=_infer_activation if gated else _infer_plain,
        kernel_class="swiglu",
        flops=elementwise("h", flops),
        dgrad=Gradient(f"{op}_dgrad", reads=("d_y", "h"), gives=("h",), flops=elementwise("h", 2 * flops)),
    )


# --- Biases: one number per column, for one product or for the products of many experts
def _infer_bias(x_TN: Tensor, b_N: Tensor) -> tuple[Tensor, ...]:
    assert x_TN.shape[1:] == b_N.shape, (x_TN, b_N)
    return (x_TN,)


def _infer_grouped(x_RN: Tensor, b_EN: Tensor, offsets_E: Tensor, gate_R: Tensor | None) -> tuple[Tensor, ...]:
    assert x_RN.shape[1:] == b_EN.shape[1:] and offsets_E.shape == b_EN.shape[:1], (x_RN, b_EN, offsets_E)
    assert gate_R is None or gate_R.shape == x_RN.shape[:1], (x_RN, gate_R)
    return (x_RN,)


BIAS = Rule(
    args=("x", "b"),
    outputs=("y",),
    infer=_infer_bias,
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


# --- Scaling, softcap (cap·tanh(x / cap)), and rows minus their means
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


# --- Sums, and concatenation and splitting of columns: torch's own ops. `split2` returns views
def _infer_add(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    assert a == b, (a, b)
    return (a,)


def _infer_cat2(a_TM: Tensor, b_TN: Tensor) -> tuple[Tensor, ...]:
    (T, M), (_, N) = a_TM.shape, b_TN.shape
    return (Tensor((T, M + N), a_TM.dtype),)


def _infer_split2(x_TM: Tensor, at: int) -> tuple[Tensor, ...]:
    T, M = x_TM.shape
    assert 0 < at < M, (x_TM, at)
    return Tensor((T, at), x_TM.dtype), Tensor((T, M - at), x_TM.dtype)


ADD = Rule(
    args=("a", "b"),
    outputs=("y",),
    infer=_infer_add,
    kernel_class="add",
    flops=elementwise("a", 1),
    dgrad=Gradient("", reads=("d_y",), gives=("a", "b")),
)
CAT2 = Rule(
    args=("a", "b"),
    outputs=("y",),
    infer=_infer_cat2,
    kernel_class="copy",
    dgrad=Gradient("split2", reads=("d_y", Extent("a", 1)), gives=("a", "b")),
)
SPLIT2 = Rule(
    args=("x", "at"),
    outputs=("a", "b"),
    infer=_infer_split2,
    kernel_class="copy",
    differentiable=("a", "b"),
    dgrad=Gradient("cat2", reads=("d_a", "d_b"), gives=("x",)),
    view=True,
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
    "add_bias": BIAS,
    "add_grouped_bias": GROUPED_BIAS,
    "center": CENTER,
    "scale": SCALE,
    "softcap": SOFTCAP,
    "add": ADD,
    "cat2": CAT2,
    "split2": SPLIT2,
}


# --- Quantising casts. The storage pass inserts them and sets the dtypes of their results; no layer calls them


def _infer(*_: object) -> tuple[Tensor, ...]:
    raise AssertionError("the storage pass sets the dtypes of a quantising cast")


QUANTISE = Rule(args=("x",), outputs=("y",), infer=_infer, kernel_class="quantise")
REQUANTISE = Rule(args=("q",), outputs=("y",), infer=_infer, kernel_class="quantise")  # row tiles to column tiles
QUANTISE_BOTH = Rule(args=("x",), outputs=("y", "by_columns"), infer=_infer, kernel_class="quantise")
QUANTISE_COLUMNS = Rule(args=("x",), outputs=("y",), infer=_infer, kernel_class="quantise")
DEQUANTISE = Rule(args=("q",), outputs=("y",), infer=_infer, kernel_class="quantise")
CASTS = {
    "dequantise": DEQUANTISE,
    "quantise": QUANTISE,
    "quantise_both": QUANTISE_BOTH,
    "quantise_columns": QUANTISE_COLUMNS,
    "requantise": REQUANTISE,
}
