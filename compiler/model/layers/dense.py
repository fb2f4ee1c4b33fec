"""The dense feed-forward part of a layer. T tokens of a micro-batch · D hidden."""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers import custom, hyper
from compiler.model.layers.builder import Place, linear, named, segment, weights
from compiler.model.layers.residual import (
    arriving,
    entering,
    entrance,
    exit_of,
    leaving,
    post_gain,
    pre_gain,
    sum_of,
    summed,
)
from dsl.schema import Custom, Dense, Moe
from dsl.schema.model import is_gated

# --- The activation of a feed-forward part: the op between up and down, by name, and its constants

CLAMPED = "clamped_swiglu"


def activated(ops: Any, h_TM: Any, activation: str, limit: float, alpha: float, shift: float) -> Any:
    """act(gate)·up of the columns [gate | up], or act of each column."""
    if activation == CLAMPED:
        return ops.clamped_swiglu(h_TM, limit, alpha, shift)
    return getattr(ops, activation)(h_TM)


def times_gate(ops: Any, h_RM: Any, gate_R: Any, activation: str, limit: float, alpha: float, shift: float) -> Any:
    """The activation of each row times its gate weight: one op for SwiGLU."""
    if activation == "swiglu":
        return ops.gated_swiglu(h_RM, gate_R)
    return ops.gate_rows(activated(ops, h_RM, activation, limit, alpha, shift), gate_R)


def constants_of(ffn: Dense | Moe) -> dict[str, float | str]:
    """What a segment says of its activation and of its biases; nothing where that is a SwiGLU without any."""
    biased: dict[str, float | str] = {"biased": True} if ffn.bias else {}
    if ffn.clamp is not None:
        clamp = ffn.clamp
        return {"activation": CLAMPED, "limit": clamp.limit, "alpha": clamp.alpha, "shift": clamp.shift, **biased}
    return biased if ffn.activation == "swiglu" else {"activation": ffn.activation, **biased}


def up_parts(ffn: Dense | Moe, inner: int) -> tuple[int, ...]:
    """Columns of the product before the activation, which gives `inner`: of the gate, if it has one, and of up."""
    return (inner, inner) if is_gated(ffn) else (inner,)


# --- dense

PARAMETERS = named(
    {"norm": "ffn.norm", "up": "ffn.up", "down": "ffn.down", "post_norm": "ffn.post_norm"}, "up", "down"
) | hyper.paths("ffn")


def dense(
    ops: Any,
    p: Any,
    h_TD: Any,
    y_TD: Any,
    *mixing: Any,
    eps: float,
    activation: str = "swiglu",
    limit: float = 0.0,
    alpha: float = 0.0,
    shift: float = 0.0,
    biased: bool = False,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    streams: hyper.Streams = (),
) -> tuple[Any, ...]:
    """residual + down(act(up(rmsnorm(residual)))), the residual being h + y, of which attention gave y."""
    residual_TD, x_TD, following = arriving(ops, p, h_TD, y_TD, mixing, streams)
    x_TD = entering(ops, p, x_TD, eps, pre)
    act_TI = activated(ops, linear(ops, p, "up", x_TD, biased), activation, limit, alpha, shift)
    y_TD = leaving(ops, p, linear(ops, p, "down", act_TI, biased), eps, post, factor)
    return (summed(ops, residual_TD, y_TD, following),)


def part(
    ops: Any,
    p: Any,
    x_TD: Any,
    *,
    activation: str = "swiglu",
    limit: float = 0.0,
    alpha: float = 0.0,
    shift: float = 0.0,
    biased: bool = False,
    pre: bool = False,
) -> tuple[Any, ...]:
    """What a tensor rank's part of the width adds to down(act(up(x))); its bias comes behind the sum."""
    act_TI = activated(ops, linear(ops, p, "up", x_TD, biased), activation, limit, alpha, shift)
    return (ops.linear(act_TI, p.down),)


def build(place: Place) -> ir.Segment:
    ffn, D = place.ffn, place.D
    if isinstance(ffn, Custom):
        return custom.build_ffn(place, ffn)
    assert isinstance(ffn, Dense), "a segment of a dense layer"
    inner = ffn.inner // place.ways
    parts = up_parts(ffn, inner)
    up = place.rows(weights(place, "up", sum(parts), D, ffn.bias), *parts)
    down = place.columns(weights(place, "down", D, inner, ffn.bias and not place.part))
    if place.part:
        x = (place.input("x", place.T, D),)
        return segment("dense", part, (*up, *down), x, ("y",), **constants_of(ffn), **entrance(place))
    return segment(
        "dense",
        dense,
        (*hyper.mixers(place), *pre_gain(place), *up, *down, *post_gain(place)),
        sum_of(place),
        ("out",),
        eps=place.model.norm_eps,
        **constants_of(ffn),
        **hyper.streams_of(place),
        **entrance(place),
        **exit_of(place),
    )
