"""Linear attention by a gated delta rule. Sources: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692.

T tokens of a micro-batch · D hidden. Queries, keys and values come from one product, and pass a short convolution and
a SiLU. What the delta rule gives is normed head by head and gated. Decays and `beta` are products in FP32. With a decay
of each channel, decays and the gate are products of low rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place, segment
from compiler.model.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from dsl.schema import DeltaNet

NAMES = ("norm", "qkv", "convolution", "beta", "decay_down", "decay", "decay_rate", "decay_bias", "gate_down", "gate")
PARAMETERS = {name: f"attention.{name}" for name in (*NAMES, "out_norm", "out", "post_norm")}
# Where a model is trained from the beginning, decays of e^a·softplus(bias) are as in both papers: e^a is some 1 to 16,
# and the softplus some 0.001 to 0.1. Deviations and means of even numbers, the logarithms of these.
RATE, BIAS = (0.8, 1.386), (1.33, -4.6)


def deltanet(
    ops: Any,
    p: Any,
    h_TD: Any,
    *starts_T: Any,
    eps: float,
    sequence: int,
    heads: int,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    channels: bool = False,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    part: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, and out(norm(delta_rule(q, k, v))·gate). `channels`: each channel of a key decays on its own.

    `starts_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its heads add to
    the sum.
    """
    x_TD = entering(ops, p, h_TD, eps, pre)
    qkv_T = ops.convolve(ops.linear(x_TD, p.qkv), p.convolution, sequence, *starts_T)
    q_T, kv_T = ops.split2(qkv_T, key_heads * key_dim)
    k_T, v_T = ops.split2(kv_T, key_heads * key_dim)
    beta_TH = ops.linear_wide(x_TD, p.beta)
    decay_T = ops.linear_wide(ops.linear(x_TD, p.decay_down) if channels else x_TD, p.decay)
    decay_T = ops.log_decay(ops.add_bias(decay_T, p.decay_bias), p.decay_rate)
    o_T = ops.delta_rule(q_T, k_T, v_T, beta_TH, decay_T, sequence, key_heads, *starts_T)
    gate_T = ops.linear(ops.linear(x_TD, p.gate_down) if channels else x_TD, p.gate)
    o_T = ops.gate_columns(ops.head_rmsnorm(o_T, p.out_norm, eps), gate_T, not channels)
    y_TD = ops.linear(o_T, p.out)
    return (y_TD,) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor))


def build(place: Place, sizes: DeltaNet) -> ir.Segment:
    heads, key_heads = sizes.heads // place.ways, sizes.key_heads // place.ways
    keys, values, rank = key_heads * sizes.key_dim, heads * sizes.value_dim, sizes.value_dim
    channels = sizes.gate == "channel"
    decays, D = keys // key_heads * heads if channels else heads, place.D
    taps = place.weight("convolution", 2 * keys + values, sizes.convolution)
    taps = replace(taps, init=(3 * sizes.convolution) ** -0.5, uniform=True)
    low = (place.weight("decay_down", rank, D),), (place.weight("gate_down", rank, D),)
    params = (
        *place.rows((place.weight("qkv", 2 * keys + values, D),), keys, keys, values),
        *(replace(each, matrices=()) for each in place.rows((taps,), keys, keys, values)),
        *place.rows((place.weight("beta", heads, D),), heads),
        *(low[0] if channels else ()),
        *place.rows((place.weight("decay", decays, rank if channels else D),), decays),
        *place.rows((replace(place.vector("decay_bias", decays, BIAS[0]), uniform=True, mean=BIAS[1]),), decays),
        *place.rows((replace(place.vector("decay_rate", heads, RATE[0]), uniform=True, mean=RATE[1]),), heads),
        *(low[1] if channels else ()),
        *place.rows((place.weight("gate", values, rank if channels else D),), values),
        place.gain("out_norm", sizes.value_dim),
        *place.columns((place.weight("out", D, values),)),
    )
    return segment(
        "attention",
        deltanet,
        (*pre_gain(place), *params, *post_gain(place)),
        (place.input("h", place.T, D), *place.places),
        ("y",) if place.part else ("entered", "y"),
        eps=place.model.norm_eps,
        sequence=place.spec.train.sequence,
        heads=heads,
        key_heads=key_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        **({"channels": True} if channels else {}),
        **({"part": True} if place.part else {}),
        **entrance(place),
        **exit_of(place),
    )
