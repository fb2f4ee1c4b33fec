"""The dense feed-forward part of a layer.

    y = act(x W_up) W_down         act: SwiGLU on [gate | up] (arXiv 2002.05202), or another activation

T tokens of a micro-batch · D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import custom, hyper
from compiler.model.layers.builder import Constant, Place, add_bias_paths, linear, segment_of, weights
from compiler.model.layers.residual import entrance, exit_of, of_sum, post_gain, pre_gain, sum_of
from dsl.schema import Custom, Dense, Moe
from dsl.schema.model import is_gated

# --- The activation of a feed-forward part: the op between up and down, by name, and its constants

CLAMPED = "clamped_swiglu"


@dataclass(frozen=True)
class Activation:
    """The op between up and down, by name, and the constants of a clamped one."""

    op: str = "swiglu"
    limit: float = 0.0
    alpha: float = 0.0
    shift: float = 0.0

    def __call__(self, ops: Any, h_TM: Any) -> Any:
        """act(gate)·up on the columns [gate | up], or act on each column."""
        if self.op == CLAMPED:
            return ops.clamped_swiglu(h_TM, self.limit, self.alpha, self.shift)
        return getattr(ops, self.op)(h_TM)

    def times_gate(self, ops: Any, h_RM: Any, gate_R: Any) -> Any:
        """The activation times the gate weight of each row, as one op for SwiGLU."""
        if self.op == "swiglu":
            return ops.gated_swiglu(h_RM, gate_R)
        return ops.gate_rows(self(ops, h_RM), gate_R)


def activation_of(ffn: Dense | Moe) -> Activation:
    """The activation of a feed-forward part, with its clamp if it has one."""
    if ffn.clamp is not None:
        return Activation(CLAMPED, ffn.clamp.limit, ffn.clamp.alpha, ffn.clamp.shift)
    return Activation(ffn.activation)


def constants_of(ffn: Dense | Moe) -> dict[str, Constant]:
    """The constants of the activation and biases; none for a SwiGLU without biases."""
    biased: dict[str, Constant] = {"biased": True} if ffn.bias else {}
    if ffn.clamp is not None:
        clamp = ffn.clamp
        return {"activation": CLAMPED, "limit": clamp.limit, "alpha": clamp.alpha, "shift": clamp.shift, **biased}
    return biased if ffn.activation == "swiglu" else {"activation": ffn.activation, **biased}


def up_parts(ffn: Dense | Moe, inner: int) -> tuple[int, ...]:
    """Columns of the parts of the up projection, for an activation that returns `inner`: gate, if any, and up."""
    return (inner, inner) if is_gated(ffn) else (inner,)


# --- dense

PARAMETERS = add_bias_paths(
    {"norm": "ffn.norm", "up": "ffn.up", "down": "ffn.down", "post_norm": "ffn.post_norm"}, "up", "down"
) | hyper.paths("ffn")


@dataclass(frozen=True)
class FeedForward:
    """down(act(up(x))). On a tensor-parallel shard the bias of `down` is added after the sum over ranks."""

    activation: Activation
    biased: bool
    down_biased: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any) -> tuple[Any, ...]:
        act_TI = self.activation(ops, linear(ops, p, "up", x_TD, self.biased))
        return (linear(ops, p, "down", act_TI, self.down_biased),)


def build(place: Place) -> ir.Segment:
    """The segment of a dense feed-forward part: the residual stream (T·N) and attention's output (T·D) -> the stream
    after the layer (T·N). A tensor-parallel shard takes normed rows x, and returns its part of the output."""
    ffn, D = place.ffn, place.D
    if isinstance(ffn, Custom):
        return custom.build_ffn(place, ffn)
    assert isinstance(ffn, Dense), "a segment of a dense layer"
    inner = ffn.inner // place.tensor_shards
    parts = up_parts(ffn, inner)
    up = place.rows(weights(place, "up", sum(parts), D, ffn.bias), *parts)
    down = place.columns(weights(place, "down", D, inner, ffn.bias and not place.is_tensor_shard))
    part = FeedForward(activation_of(ffn), ffn.bias, ffn.bias and not place.is_tensor_shard)
    if place.is_tensor_shard:
        x = (place.input("x", place.T, D),)
        return segment_of("dense", part, (*up, *down), x, ("y",), constants_of(ffn) | entrance(place))
    return segment_of(
        "dense",
        of_sum(place, part),
        (*hyper.mixers(place), *pre_gain(place), *up, *down, *post_gain(place)),
        sum_of(place),
        ("out",),
        {"eps": place.model.norm_eps} | constants_of(ffn) | hyper.streams_of(place) | entrance(place) | exit_of(place),
    )
