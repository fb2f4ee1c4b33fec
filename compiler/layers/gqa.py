"""Grouped-query attention of a pre-norm block. Source: Ainslie et al., "GQA", arXiv 2305.13245.

T tokens of a micro-batch · D hidden. Queries, keys and values come from one product: its columns are those of the query
heads, then of the key heads, then of the value heads. With `qk_norm`, queries and keys are normed head by head before
the rotation, as Qwen3 does, arXiv 2505.09388.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Place, segment
from dsl.schema import Gqa

PARAMETERS = {
    "norm": "attention.norm",
    "qkv": "attention.qkv",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "out": "attention.out",
}


def gqa(
    ops: Any,
    p: Any,
    h_TD: Any,
    *,
    eps: float,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    theta: float,
) -> tuple[Any, ...]:
    """h, handed through, and out(attend(q, k, v)): query head i reads key and value head i // (heads / kv_heads)."""
    x_TD = ops.rmsnorm(h_TD, p.norm, eps)
    q_T, kv_T = ops.split2(ops.linear(x_TD, p.qkv), heads * head_dim)
    k_T, v_T = ops.split2(kv_T, kv_heads * head_dim)
    if qk_norm:
        q_T, k_T = ops.head_rmsnorm(q_T, p.q_norm, eps), ops.head_rmsnorm(k_T, p.k_norm, eps)
    o_T = ops.gqa_attention(q_T, k_T, v_T, sequence, heads, kv_heads, theta)
    return h_TD, ops.linear(o_T, p.out)


def build(place: Place, sizes: Gqa) -> ir.Segment:
    D, C, weight, gain = place.D, sizes.head_dim, place.weight, place.gain
    norms = (gain("q_norm", C), gain("k_norm", C)) if sizes.qk_norm else ()
    return segment(
        "attention",
        gqa,
        (
            gain("norm", D),
            weight("qkv", (sizes.heads + 2 * sizes.kv_heads) * C, D),
            *norms,
            weight("out", D, sizes.heads * C),
        ),
        (place.input("h", place.T, D),),
        ("entered", "y"),
        eps=place.model.norm_eps,
        sequence=place.spec.train.sequence,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=C,
        qk_norm=sizes.qk_norm,
        theta=sizes.rope.theta,
    )
