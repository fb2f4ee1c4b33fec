"""Linear attention by a gated delta rule. Sources: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692.

    q, k, v = split(silu(convolve(x W_qkv)))
    S_t     = (I − β_t k_t k_tᵀ) diag(exp(a_t)) S_{t−1} + β_t k_t v_tᵀ     per head; a_t ≤ 0 and β_t depend on x
    y       = (norm(S_tᵀ q_t) · act(gate)) W_out                         the norm is per head

T tokens of a micro-batch · D hidden. The convolution is short. a and β are projected in FP32. With a decay per channel,
the projections of a and of the gate are low-rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from compiler import ir
from compiler.model.layers.builder import Place, segment_of
from compiler.model.layers.residual import entrance, exit_of, post_gain, pre_gain, through_stream
from dsl.schema import DeltaNet

NAMES = ("norm", "qkv", "convolution", "beta", "decay_down", "decay", "decay_rate", "decay_bias", "gate_down", "gate")
PARAMETERS = {name: f"attention.{name}" for name in (*NAMES, "out_norm", "out", "post_norm")}
# Initialization as in both papers: the decay is e^a·softplus(bias), with e^a between about 1 and 16 and the softplus
# between about 0.001 and 0.1. (standard deviation, mean) of uniform values, of the logarithms of these.
RATE, BIAS = (0.8, 1.386), (1.33, -4.6)


@dataclass(frozen=True)
class DeltaNetAttention:
    """out(norm(delta_rule(q, k, v))·gate). keys: columns of all keys. channels: each channel of a key has its own
    decay."""

    eps: float
    sequence: int
    key_heads: int
    keys: int
    channels: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any, *starts_T: Any) -> tuple[Any, ...]:
        qkv_T = ops.convolve(ops.linear(x_TD, p.qkv), p.convolution, self.sequence, *starts_T)
        q_T, kv_T = ops.split2(qkv_T, self.keys)
        k_T, v_T = ops.split2(kv_T, self.keys)
        beta_TH = ops.linear_wide(x_TD, p.beta)
        decay_T = ops.linear_wide(ops.linear(x_TD, p.decay_down) if self.channels else x_TD, p.decay)
        decay_T = ops.log_decay(ops.add_bias(decay_T, p.decay_bias), p.decay_rate)
        o_T = ops.delta_rule(q_T, k_T, v_T, beta_TH, decay_T, self.sequence, self.key_heads, *starts_T)
        gate_T = ops.linear(ops.linear(x_TD, p.gate_down) if self.channels else x_TD, p.gate)
        o_T = ops.gate_columns(ops.head_rmsnorm(o_T, p.out_norm, self.eps), gate_T, not self.channels)
        return (ops.linear(o_T, p.out),)


def build(place: Place, sizes: DeltaNet) -> ir.Segment:
    """The segment of gated linear attention: h (T·D) -> the residual stream and the value to add to it, both T·D. A
    tensor-parallel shard takes normed rows, and returns only its part of the value."""
    heads, key_heads = sizes.heads // place.tensor_shards, sizes.key_heads // place.tensor_shards
    keys, values, rank = key_heads * sizes.key_dim, heads * sizes.value_dim, sizes.value_dim
    channels = sizes.gate == "channel"
    decays, D = keys // key_heads * heads if channels else heads, place.D
    taps = place.weight("convolution", 2 * keys + values, sizes.convolution)
    taps = replace(taps, init=(3 * sizes.convolution) ** -0.5, uniform=True)
    low = (place.weight("decay_down", rank, D),), (place.weight("gate_down", rank, D),)
    params = (
        *place.rows((place.weight("qkv", 2 * keys + values, D),), keys, keys, values),
        *(replace(param, matrices=()) for param in place.rows((taps,), keys, keys, values)),
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
    eps, sequence = place.model.norm_eps, place.spec.train.sequence
    attention = DeltaNetAttention(eps, sequence, key_heads, keys, channels)
    return segment_of(
        "attention",
        attention if place.is_tensor_shard else through_stream(place, attention),
        (*pre_gain(place), *params, *post_gain(place)),
        (place.input("h", place.T, D), *place.places),
        ("y",) if place.is_tensor_shard else ("entered", "y"),
        {"eps": eps, "sequence": sequence, "heads": heads, "key_heads": key_heads}
        | {"key_dim": sizes.key_dim, "value_dim": sizes.value_dim}
        | ({"channels": True} if channels else {})
        | ({"part": True} if place.is_tensor_shard else {})
        | entrance(place)
        | exit_of(place),
    )
