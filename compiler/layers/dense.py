"""The dense feed-forward part of a layer, a pre-norm residual block. T tokens of a micro-batch · D hidden."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.activation import activated, constants_of, up_width
from compiler.layers.builder import Place, segment
from dsl.schema import Dense

PARAMETERS = {"norm": "ffn.norm", "up": "ffn.up", "down": "ffn.down"}


def dense(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *,
    eps: float,
    activation: str = "swiglu",
    limit: float = 0.0,
    alpha: float = 0.0,
    shift: float = 0.0,
) -> tuple[Any, ...]:
    """residual + down(act(up(rmsnorm(residual)))), the residual being h + y, of which attention gave y."""
    residual_TD = ops.add(h_TD, y_TD)
    x_TD = ops.rmsnorm(residual_TD, p.norm, eps)
    act_TI = activated(ops, ops.linear(x_TD, p.up), activation, limit, alpha, shift)
    return (ops.add(residual_TD, ops.linear(act_TI, p.down)),)


def build(place: Place) -> ir.Segment:
    ffn, D = place.ffn, place.D
    assert isinstance(ffn, Dense), "a segment of a dense layer"
    return segment(
        "dense",
        dense,
        (place.gain("norm", D), place.weight("up", up_width(ffn, ffn.inner), D), place.weight("down", D, ffn.inner)),
        (place.input("h", place.T, D), place.input("y", place.T, D)),
        ("out",),
        eps=place.model.norm_eps,
        **constants_of(ffn),
    )
