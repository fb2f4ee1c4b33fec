"""Dtypes in which the segments of a run keep and send their values, by its precision."""

from __future__ import annotations

from compiler.dtypes import TORCH_DTYPE, Packed
from compiler.layers.builder import Place
from dsl.schema import Dtype, Tile

# Whose products may be in eight bits: neither those of the gate nor those of the head, arXiv 2412.19437, §3.3.1.
PRODUCTS = ("attention", "dense", "experts", "mtp_input", "shared")
# Values of rows that are exchanged: those that go to the experts, and those that come back, gradients among both.
TO_EXPERTS = {"router": ("rows",), "experts": ("rows", "d_y"), "join": ("d_rows",)}
BACK = {"router": ("d_rows",), "experts": ("y", "d_rows"), "join": ("rows",)}


def stored(place: Place, kind: str) -> tuple[tuple[str, str], ...]:
    """(value or role, dtype) of a segment's values that are not kept as they are computed."""
    precision = place.spec.precision
    result: list[tuple[str, str]] = []
    if precision.linear == "e4m3" and kind in PRODUCTS:
        assert precision.weight_tile, "the rules ask for it"
        weights = str(Packed(TORCH_DTYPE["e4m3"], precision.weight_tile.rows, precision.weight_tile.columns))
        result += [("operands", _dtype("e4m3", precision.activation_tile)), ("weights", weights)]
    result += [(value, to_experts(place)) for value in TO_EXPERTS.get(kind, ())]
    result += [(value, back(place)) for value in BACK.get(kind, ())]
    return tuple((value, dtype) for value, dtype in result if dtype != place.dtype)


def to_experts(place: Place) -> str:
    """Dtype of rows on their way to the experts, and of gradients of rows that came from them.

    Scales of both are powers of two, as in DeepSeek-V3, arXiv 2412.19437, §3.3.3.
    """
    return _dtype(place.spec.precision.dispatch, place.spec.precision.activation_tile, pow2=True)


def back(place: Place) -> str:
    """Dtype of rows on their way back, and of gradients of rows that went to the experts."""
    return _dtype(place.spec.precision.combine, place.spec.precision.activation_tile)


def _dtype(dtype: Dtype, tile: Tile | None, pow2: bool = False) -> str:
    if dtype != "e4m3":
        return TORCH_DTYPE[dtype]
    assert tile, "the rules ask for it"
    return str(Packed(TORCH_DTYPE[dtype], tile.rows, tile.columns, pow2))
