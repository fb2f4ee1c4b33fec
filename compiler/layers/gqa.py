"""Grouped-query attention. Source: Ainslie et al., "GQA", arXiv 2305.13245.

T tokens of a micro-batch · D hidden. Queries, keys and values come from one product: its columns are those of the query
heads, then of the key heads, then of the value heads. With `qk_norm`, queries and keys are normed before the rotation:
head by head, as Qwen3 does, arXiv 2505.09388, or all heads as one, as OLMoE does, arXiv 2409.02060. `rotation` says
how they are rotated in front of attention, if it does not rotate them itself.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Constant, Place, segment
from compiler.layers.linear import linear, named, weights
from compiler.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from compiler.layers.rotation import Rotation, constants, rotated
from dsl.schema import Gqa

NAMES = ("norm", "qkv", "q_norm", "k_norm", "sinks", "out", "post_norm")
PARAMETERS = named({name: f"attention.{name}" for name in NAMES}, "qkv", "out")


def gqa(
    ops: Any,
    p: Any,
    h_TD: Any,
    *starts_T: Any,
    eps: float,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    theta: float,
    biased: bool = False,
    out_biased: bool = False,
    rotation: Rotation = (),
    query_scale: float = 1.0,
    bounded: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    part: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, and out(attend(q, k, v)): query head i reads key and value head i // (heads / kv_heads).

    `starts_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its heads add to
    the sum.
    """
    x_TD = entering(ops, p, h_TD, eps, pre)
    qkv_T = linear(ops, p, "qkv", x_TD, biased)
    q_T, kv_T = ops.split2(qkv_T, heads * head_dim)
    k_T, v_T = ops.split2(kv_T, kv_heads * head_dim)
    if qk_norm:
        q_T, k_T = ops.head_rmsnorm(q_T, p.q_norm, eps), ops.head_rmsnorm(k_T, p.k_norm, eps)
    q_T = rotated(ops, q_T, starts_T, sequence, heads, 0, rotation, query_scale)
    k_T = rotated(ops, k_T, starts_T, sequence, kv_heads, 0, rotation)
    if bounded:
        logits = p.sinks if sinks else None
        sizes = sequence, heads, kv_heads, theta, window, softcap
        o_T = ops.bounded_attention(q_T, k_T, v_T, logits, *sizes, *starts_T)
    else:
        o_T = ops.gqa_attention(q_T, k_T, v_T, sequence, heads, kv_heads, theta, *starts_T)
    y_TD = linear(ops, p, "out", o_T, out_biased)
    return (y_TD,) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor))


def build(place: Place, sizes: Gqa) -> ir.Segment:
    D, C = place.D, sizes.head_dim
    heads, kv_heads = sizes.heads // place.ways, sizes.kv_heads // place.ways
    parts = (heads * C, kv_heads * C, kv_heads * C)
    normed = {"head": (C, C), "width": (heads * C, kv_heads * C)}
    return segment(
        "attention",
        gqa,
        (
            *pre_gain(place),
            *place.rows(weights(place, "qkv", sum(parts), D, sizes.bias is not None), *parts),
            *(map(place.gain, ("q_norm", "k_norm"), normed[sizes.qk_norm]) if sizes.qk_norm else ()),
            *(place.rows((place.vector("sinks", heads, place.model.init_std),), heads) if sizes.sinks else ()),
            *place.columns(weights(place, "out", D, heads * C, sizes.bias == "all" and not place.part)),
            *post_gain(place),
        ),
        (place.input("h", place.T, D), *place.starts),
        ("y",) if place.part else ("entered", "y"),
        eps=place.model.norm_eps,
        sequence=place.spec.train.sequence,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=C,
        qk_norm=sizes.qk_norm is not None,
        **constants(sizes),
        **_options(place, sizes),
        **entrance(place),
        **exit_of(place),
    )


def _options(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """The constants of what a model has beside plain attention; none of them where it has nothing of it."""
    bounded = sizes.window is not None or sizes.softcap is not None or sizes.sinks
    options = {
        "biased": sizes.bias is not None,
        "out_biased": sizes.bias == "all" and not place.part,
        "bounded": bounded,
        "window": sizes.window or 0,
        "softcap": sizes.softcap or 0.0,
        "sinks": sizes.sinks,
        "part": place.part,
    }
    return {name: value for name, value in options.items() if value}
