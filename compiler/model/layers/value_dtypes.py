"""The dtypes in which the segments of a run store and send values, from the run's precision."""

from __future__ import annotations

from compiler.ir.dtypes import TORCH_DTYPE, WHOLE_TENSOR, PackedDtype
from compiler.model.layers.builder import Place
from dsl.facts.formats import E5M6, FP8
from dsl.schema import DeltaNet, Dtype, Precision, Tile
from dsl.schema.precision import format_of

# Segments whose products may be quantised: not those of the router or the head, arXiv 2412.19437, §3.3.1.
PRODUCTS = ("attention", "project", "attend", "dense", "experts", "mtp_input", "shared")
# Exchanged rows: those sent to the experts and those sent back, gradients included.
TO_EXPERTS = {"router": ("rows",), "experts": ("rows", "d_y"), "join": ("d_rows",)}
BACK = {"router": ("d_rows",), "experts": ("y", "d_rows"), "join": ("rows",)}


def storage_dtypes(place: Place, kind: str) -> tuple[tuple[str, str], ...]:
    """(value or role, dtype) of a segment's values that are stored in another dtype than they are computed in."""
    precision = place.spec.precision
    result: list[tuple[str, str]] = []
    is_module = place.is_custom(kind)
    quantises = precision.linear in ("e4m3", "e2m1") and kind in PRODUCTS and not place.is_high_precision
    if quantises and not is_module:
        result += [("operands", _operand(precision, precision.activation_tile))]
        result += [("weights", _operand(precision, precision.weight_tile))]
        result += [("columns", word) for word in _flags(precision)]
    softmax = not is_module and not isinstance(place.attention or place.model.attention, DeltaNet)
    if precision.attention_output == E5M6.element and kind in ("attention", "attend") and softmax:
        result += [("attention_output", str(PackedDtype(E5M6.name, *E5M6.tile)))]
    if kind == "head" and precision.logits and "logits" not in place.spec.recompute:  # not if block by block
        result += [("logits", TORCH_DTYPE[precision.logits])]
    result += [(value, dispatch_dtype_of(place)) for value in TO_EXPERTS.get(kind, ())]
    result += [(value, combine_dtype_of(place)) for value in BACK.get(kind, ())]
    return tuple((value, dtype) for value, dtype in result if dtype != place.dtype)


def dispatch_dtype_of(place: Place) -> str:
    """Dtype of rows sent to the experts, and of gradients of the rows that they return.

    Scales of both are powers of two, as in DeepSeek-V3, arXiv 2412.19437, §3.3.3. Experts whose linears stay in the
    dtype of activations get rows in that dtype.
    """
    if place.is_high_precision:
        return place.dtype
    return _dtype(place.spec.precision.dispatch, place.spec.precision.activation_tile, pow2=True)


def combine_dtype_of(place: Place) -> str:
    """Dtype of rows sent back, and of gradients of the rows that were sent to the experts."""
    return _dtype(place.spec.precision.combine, place.spec.precision.activation_tile)


def _operand(precision: Precision, tile: Tile | None) -> str:
    """The dtype of operands: E4M3 in tiles of any size or with one scale, or a format."""
    if precision.scales_tensors:
        return str(PackedDtype(TORCH_DTYPE[precision.linear], WHOLE_TENSOR, WHOLE_TENSOR))
    assert tile, "the rules require a tile"
    form = format_of(precision)
    element = TORCH_DTYPE[precision.linear] if form in (None, FP8) else form.name
    return str(PackedDtype(element, tile.rows, tile.columns))


def _flags(precision: Precision) -> tuple[str, ...]:
    """The transformations of gradients and of the inputs of weight gradients, for formats."""
    stochastic = precision.gradient_rounding == "stochastic"
    return ("hadamard",) * precision.hadamard + ("stochastic",) * stochastic


def _dtype(dtype: Dtype, tile: Tile | None, pow2: bool = False) -> str:
    if dtype != "e4m3":
        return TORCH_DTYPE[dtype]
    assert tile, "the rules require a tile"
    return str(PackedDtype(TORCH_DTYPE[dtype], tile.rows, tile.columns, ("pow2",) * pow2))
