"""Multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434, §2.1.

T tokens of a micro-batch · D hidden · C rank of keys and values. Queries are of low rank too, if the model says so.
`rotation` says how the rope parts are rotated in front of attention, if it does not rotate them itself.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Place, segment
from compiler.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from compiler.layers.rotation import Rotation, constants, rotated
from dsl.schema import Mla

PARAMETERS = {
    "norm": "attention.norm",
    "q": "attention.q",
    "q_down": "attention.q_down",
    "q_norm": "attention.q_norm",
    "q_up": "attention.q_up",
    "kv_down": "attention.kv_down",
    "kv_norm": "attention.kv_norm",
    "kv_up": "attention.kv_up",
    "out": "attention.out",
    "post_norm": "attention.post_norm",
}


def mla(
    ops: Any,
    p: Any,
    h_TD: Any,
    *starts_T: Any,
    eps: float,
    query_rank: int,
    kv_rank: int,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    rotation: Rotation = (),
    query_scale: float = 1.0,
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
    part: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, and out(attend(q, [k_nope | v], k_rope)): keys and values from a normed latent, one rope key
    for all heads. `starts_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its
    heads add to the sum; latents are of all heads, and each rank computes them."""
    x_TD = entering(ops, p, h_TD, eps, pre)
    if query_rank:
        q_T = ops.linear(ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, eps), p.q_up)
    else:
        q_T = ops.linear(x_TD, p.q)
    latent_TC, k_rope_T = ops.split2(ops.linear(x_TD, p.kv_down), kv_rank)
    q_T = rotated(ops, q_T, starts_T, sequence, heads, nope, rotation, query_scale)
    k_rope_T = rotated(ops, k_rope_T, starts_T, sequence, 1, 0, rotation)
    kv_T = ops.linear(ops.rmsnorm(latent_TC, p.kv_norm, eps), p.kv_up)
    o_T = ops.mla_attention(q_T, kv_T, k_rope_T, sequence, heads, nope, rope, value, theta, *starts_T)
    y_TD = ops.linear(o_T, p.out)
    return (y_TD,) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor))


def build(place: Place, sizes: Mla) -> ir.Segment:
    D, weight, gain = place.D, place.weight, place.gain
    nope, rope, value = sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value
    heads = sizes.heads // place.ways
    query_width, kv_width = heads * (nope + rope), heads * (nope + value)
    query: tuple[ir.Param, ...] = place.rows((weight("q", query_width, D),), query_width)
    if sizes.query_rank:
        query = (
            weight("q_down", sizes.query_rank, D),
            gain("q_norm", sizes.query_rank),
            *place.rows((weight("q_up", query_width, sizes.query_rank),), query_width),
        )
    return segment(
        "attention",
        mla,
        (
            *pre_gain(place),
            *query,
            weight("kv_down", sizes.kv_rank + rope, D),
            gain("kv_norm", sizes.kv_rank),
            *place.rows((weight("kv_up", kv_width, sizes.kv_rank),), kv_width),
            *place.columns((weight("out", D, heads * value),)),
            *post_gain(place),
        ),
        (place.input("h", place.T, D), *place.starts),
        ("y",) if place.part else ("entered", "y"),
        eps=place.model.norm_eps,
        query_rank=sizes.query_rank or 0,
        kv_rank=sizes.kv_rank,
        sequence=place.spec.train.sequence,
        heads=heads,
        nope=nope,
        rope=rope,
        value=value,
        **constants(sizes),
        **({"part": True} if place.part else {}),
        **entrance(place),
        **exit_of(place),
    )
