"""Grouped-query attention. Source: Ainslie et al., "GQA", arXiv 2305.13245.

T tokens of a micro-batch · D hidden. Queries, keys and values come from one product: its columns are those of the query
heads, then of the key heads, then of the value heads. With `qk_norm`, queries and keys are normed before the rotation:
head by head, as Qwen3 does, arXiv 2505.09388, or all heads as one, as OLMoE does, arXiv 2409.02060. `rotation` says
how they are rotated in front of attention, if it does not rotate them itself.

Where context ranks have parts of sequences, keys and values are put together on all of them between two segments:
`project` makes them, and `attend` reads those of whole sequences.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.layers.builder import Constant, Place, segment
from compiler.layers.linear import linear, named, weights
from compiler.layers.residual import entering, entrance, exit_of, has_post, leaving, post_gain, pre_gain
from compiler.layers.rotation import Rotation, constants, placed, rotated
from dsl.schema import Gqa

NAMES = ("norm", "qkv", "q_norm", "k_norm", "sinks", "out", "post_norm")
PARAMETERS = named({name: f"attention.{name}" for name in NAMES}, "qkv", "out")


def gqa(
    ops: Any,
    p: Any,
    h_TD: Any,
    *places_T: Any,
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

    `places_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its heads add to
    the sum.
    """
    x_TD = entering(ops, p, h_TD, eps, pre)
    sizes = sequence, heads, kv_heads
    q_T, k_T, v_T = _projected(ops, p, x_TD, places_T, *sizes, head_dim, qk_norm, eps, biased, rotation, query_scale)
    o_T = _attended(ops, p, q_T, k_T, v_T, places_T, *sizes, theta, bounded, window, softcap, sinks)
    y_TD = linear(ops, p, "out", o_T, out_biased)
    return (y_TD,) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor))


def project(
    ops: Any,
    p: Any,
    h_TD: Any,
    *places_T: Any,
    eps: float,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    biased: bool = False,
    rotation: Rotation = (),
    query_scale: float = 1.0,
    pre: bool = True,
    part: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, queries, and keys and values side by side, of the rows that a context rank has."""
    x_TD = entering(ops, p, h_TD, eps, pre)
    places_T, sizes = placed(places_T), (sequence, heads, kv_heads)
    q_T, k_T, v_T = _projected(ops, p, x_TD, places_T, *sizes, head_dim, qk_norm, eps, biased, rotation, query_scale)
    return *(() if part else (h_TD,)), q_T, ops.cat2(k_T, v_T)


def attend(
    ops: Any,
    p: Any,
    q_T: Any,
    kv_K: Any,
    *places_T: Any,
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    out_biased: bool = False,
    bounded: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    eps: float = 0.0,
    post: bool = False,
    factor: float = 1.0,
    part: bool = False,
) -> tuple[Any, ...]:
    """out(attend(q, k, v)) of the rows that a context rank has as queries, and of all rows K as keys and values."""
    k_K, v_K = ops.split2(kv_K, kv_heads * head_dim)
    where = placed(places_T)
    o_T = _attended(ops, p, q_T, k_K, v_K, where, sequence, heads, kv_heads, 0.0, bounded, window, softcap, sinks)
    y_TD = linear(ops, p, "out", o_T, out_biased)
    return (y_TD if part else leaving(ops, p, y_TD, eps, post, factor),)


def _projected(
    ops: Any,
    p: Any,
    x_TD: Any,
    places_T: tuple[Any, ...],
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    eps: float,
    biased: bool,
    rotation: Rotation,
    query_scale: float,
) -> tuple[Any, Any, Any]:
    """Queries, keys and values, normed and rotated as far as this is done in front of attention."""
    qkv_T = linear(ops, p, "qkv", x_TD, biased)
    q_T, kv_T = ops.split2(qkv_T, heads * head_dim)
    k_T, v_T = ops.split2(kv_T, kv_heads * head_dim)
    if qk_norm:
        q_T, k_T = ops.head_rmsnorm(q_T, p.q_norm, eps), ops.head_rmsnorm(k_T, p.k_norm, eps)
    q_T = rotated(ops, q_T, places_T, sequence, heads, 0, rotation, query_scale)
    k_T = rotated(ops, k_T, places_T, sequence, kv_heads, 0, rotation)
    return q_T, k_T, v_T


def _attended(
    ops: Any,
    p: Any,
    q_T: Any,
    k_T: Any,
    v_T: Any,
    places_T: tuple[Any, ...],
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    bounded: bool,
    window: int,
    softcap: float,
    sinks: bool,
) -> Any:
    """The values of what each query head attends to, side by side."""
    if bounded:
        logits = p.sinks if sinks else None
        sizes = sequence, heads, kv_heads, theta, window, softcap
        return ops.bounded_attention(q_T, k_T, v_T, logits, *sizes, *places_T)
    return ops.gqa_attention(q_T, k_T, v_T, sequence, heads, kv_heads, theta, *places_T)


def build(place: Place, sizes: Gqa) -> ir.Segment:
    return segment(
        "attention",
        gqa,
        (*pre_gain(place), *_projecting(place, sizes), *_attending(place, sizes), *post_gain(place)),
        (place.input("h", place.T, place.D), *place.places),
        ("y",) if place.part else ("entered", "y"),
        eps=place.model.norm_eps,
        **_sizes(place, sizes),
        qk_norm=sizes.qk_norm is not None,
        **constants(sizes),
        **_projection_options(place, sizes),
        **_options(place, sizes),
        **entrance(place),
        **exit_of(place),
    )


def build_project(place: Place, sizes: Gqa) -> ir.Segment:
    how = constants(sizes, apart=True)
    return segment(
        "project",
        project,
        (*pre_gain(place), *_projecting(place, sizes)),
        (place.input("h", place.T, place.D), *place.places),
        ("queries", "keys") if place.part else ("entered", "queries", "keys"),
        eps=place.model.norm_eps,
        **_sizes(place, sizes),
        qk_norm=sizes.qk_norm is not None,
        **{name: value for name, value in how.items() if name != "theta"},
        **_projection_options(place, sizes),
        **({"part": True} if place.part else {}),
        **entrance(place),
    )


def build_attend(place: Place, sizes: Gqa) -> ir.Segment:
    heads, kv_heads = sizes.heads // place.ways, sizes.kv_heads // place.ways
    q = place.input("queries", place.T, heads * sizes.head_dim)
    return segment(
        "attend",
        attend,
        (*_attending(place, sizes), *post_gain(place)),
        (q, place.input("keys", place.keys, 2 * kv_heads * sizes.head_dim), *place.places),
        ("y",),
        **_sizes(place, sizes),
        **_options(place, sizes),
        **({"eps": place.model.norm_eps} if has_post(place) else {}),
        **exit_of(place),
    )


def _projecting(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of queries, keys and values."""
    C, heads, kv_heads = sizes.head_dim, sizes.heads // place.ways, sizes.kv_heads // place.ways
    parts = (heads * C, kv_heads * C, kv_heads * C)
    normed = {"head": (C, C), "width": (heads * C, kv_heads * C)}
    return (
        *place.rows(weights(place, "qkv", sum(parts), place.D, sizes.bias is not None), *parts),
        *(map(place.gain, ("q_norm", "k_norm"), normed[sizes.qk_norm]) if sizes.qk_norm else ()),
    )


def _attending(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of attention and of what comes behind it."""
    heads = sizes.heads // place.ways
    biased = sizes.bias == "all" and not place.part
    return (
        *(place.rows((place.vector("sinks", heads, place.model.init_std),), heads) if sizes.sinks else ()),
        *place.columns(weights(place, "out", place.D, heads * sizes.head_dim, biased)),
    )


def _sizes(place: Place, sizes: Gqa) -> dict[str, Constant]:
    return {
        "sequence": place.spec.train.sequence,
        "heads": sizes.heads // place.ways,
        "kv_heads": sizes.kv_heads // place.ways,
        "head_dim": sizes.head_dim,
    }


def _projection_options(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """The constants of what a model has beside plain products for queries, keys and values."""
    return {"biased": True} if sizes.bias is not None else {}


def _options(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """The constants of what a model has beside plain attention; none of them where it has nothing of it."""
    bounded = sizes.window is not None or sizes.softcap is not None or sizes.sinks
    options = {
        "out_biased": sizes.bias == "all" and not place.part,
        "bounded": bounded,
        "window": sizes.window or 0,
        "softcap": sizes.softcap or 0.0,
        "sinks": sizes.sinks,
        "part": place.part,
    }
    return {name: value for name, value in options.items() if value}
