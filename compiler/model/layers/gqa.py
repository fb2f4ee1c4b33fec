"""Grouped-query attention. Source: Ainslie et al., "GQA", arXiv 2305.13245.

T tokens of a micro-batch · D hidden. Queries, keys and values come from one product: its columns are those of the query
heads, then of the key heads, then of the value heads. With `qk_norm`, queries and keys are normed before the rotation:
head by head, as Qwen3 does, arXiv 2505.09388, or all heads as one, as OLMoE does, arXiv 2409.02060. `rotation` says
how they are rotated in front of attention, if it does not rotate them itself. An output gate is more columns behind the
values, from column `gate_at` on: what attention gives is multiplied by their sigmoid, as in Qwen3-Next.

Where tensor ranks have heads that are normed as one, `products` makes queries, keys and values and the sums of their
squares, which the ranks add up in front of the rest.

Where context ranks have parts of sequences, keys and values are put together on all of them between two segments:
`project` makes them, and `attend` reads those of whole sequences.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers import qk_clip
from compiler.model.layers.builder import Constant, Place, linear, named, segment, weights
from compiler.model.layers.residual import entering, entrance, exit_of, has_post, leaving, post_gain, pre_gain
from compiler.model.layers.rotation import Rotation, constants, placed, rotated
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
    gate_at: int = 0,
    factor: float = 1.0,
    part: bool = False,
    ways: int = 1,
    peaks: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, and out(attend(q, k, v)): query head i reads key and value head i // (heads / kv_heads).

    `places_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its heads add to
    the sum. Where heads on `ways` ranks are normed as one, what comes is not h, but what `products` returns. With
    `peaks` the largest logit of each query head comes last.
    """
    qkv_T, squares_T, places_T = _entered(ops, p, h_TD, places_T, eps, biased, pre, ways)
    qkv_T, *gate_T = ops.split2(qkv_T, gate_at) if gate_at else (qkv_T,)
    sizes = sequence, heads, kv_heads
    turning = (*sizes, head_dim, qk_norm, eps, rotation, query_scale, ways)
    q_T, k_T, v_T = _turned(ops, p, qkv_T, squares_T, places_T, *turning)
    o_T, peaks_H = _attended(ops, p, q_T, k_T, v_T, places_T, *sizes, theta, bounded, window, softcap, sinks, peaks)
    y_TD = linear(ops, p, "out", ops.gate_columns(o_T, *gate_T, False) if gate_at else o_T, out_biased)
    return (y_TD, *peaks_H) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor), *peaks_H)


def products(
    ops: Any, p: Any, x_TD: Any, *, heads: int, kv_heads: int, head_dim: int, biased: bool = False
) -> tuple[Any, ...]:
    """Queries, keys and values of a tensor rank side by side, and the squares of its queries and of its keys."""
    qkv_T = linear(ops, p, "qkv", x_TD, biased)
    return qkv_T, ops.two_squares(qkv_T, heads * head_dim, kv_heads * head_dim)


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
    gate_at: int = 0,
    part: bool = False,
    ways: int = 1,
) -> tuple[Any, ...]:
    """h, handed through, queries with the gate behind them, if there is one, and keys and values side by side, of the
    rows that a context rank has. `ways`: as in `gqa`."""
    qkv_T, squares_T, places_T = _entered(ops, p, h_TD, places_T, eps, biased, pre, ways)
    qkv_T, *gate_T = ops.split2(qkv_T, gate_at) if gate_at else (qkv_T,)
    sizes = sequence, heads, kv_heads
    turning = (*sizes, head_dim, qk_norm, eps, rotation, query_scale, ways)
    q_T, k_T, v_T = _turned(ops, p, qkv_T, squares_T, placed(places_T), *turning)
    return *(() if part else (h_TD,)), ops.cat2(q_T, *gate_T) if gate_at else q_T, ops.cat2(k_T, v_T)


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
    gated: bool = False,
    factor: float = 1.0,
    part: bool = False,
    peaks: bool = False,
) -> tuple[Any, ...]:
    """out(attend(q, k, v)) of the rows that a context rank has as queries, and of all rows K as keys and values."""
    q_T, *gate_T = ops.split2(q_T, heads * head_dim) if gated else (q_T,)
    k_K, v_K = ops.split2(kv_K, kv_heads * head_dim)
    sizes = sequence, heads, kv_heads, 0.0, bounded, window, softcap, sinks
    o_T, peaks_H = _attended(ops, p, q_T, k_K, v_K, placed(places_T), *sizes, peaks)
    y_TD = linear(ops, p, "out", ops.gate_columns(o_T, *gate_T, False) if gated else o_T, out_biased)
    return (y_TD if part else leaving(ops, p, y_TD, eps, post, factor), *peaks_H)


def _entered(
    ops: Any, p: Any, h_TD: Any, places_T: tuple[Any, ...], eps: float, biased: bool, pre: bool, ways: int
) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Queries, keys and values side by side; the squares of all queries and keys, if they come; and places."""
    if ways > 1:
        return h_TD, ops.split2(places_T[0], 1), places_T[1:]
    return linear(ops, p, "qkv", entering(ops, p, h_TD, eps, pre), biased), (), places_T


def _turned(
    ops: Any,
    p: Any,
    qkv_T: Any,
    squares_T: tuple[Any, ...],
    places_T: tuple[Any, ...],
    sequence: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    qk_norm: bool,
    eps: float,
    rotation: Rotation,
    query_scale: float,
    ways: int,
) -> tuple[Any, Any, Any]:
    """Queries, keys and values, normed and rotated as far as this is done in front of attention."""
    q_T, kv_T = ops.split2(qkv_T, heads * head_dim)
    k_T, v_T = ops.split2(kv_T, kv_heads * head_dim)
    if squares_T:
        widths = ways * heads * head_dim, ways * kv_heads * head_dim
        q_T = ops.shared_rmsnorm(q_T, p.q_norm, squares_T[0], widths[0], eps)
        k_T = ops.shared_rmsnorm(k_T, p.k_norm, squares_T[1], widths[1], eps)
    elif qk_norm:
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
    peaks: bool,
) -> tuple[Any, tuple[Any, ...]]:
    """The values of what each query head attends to, side by side, and the largest logits if there are to be some."""
    if bounded:
        logits = p.sinks if sinks else None
        bounds = sequence, heads, kv_heads, theta, window, softcap
        return qk_clip.attended(ops, "bounded_attention", peaks, q_T, k_T, v_T, logits, *bounds, *places_T)
    sizes = sequence, heads, kv_heads, theta
    return qk_clip.attended(ops, "gqa_attention", peaks, q_T, k_T, v_T, *sizes, *places_T)


def norms_together(place: Place, sizes: Gqa) -> bool:
    """Whether heads that are normed as one are on several ranks."""
    return sizes.qk_norm == "width" and place.ways > 1


def build_products(place: Place, sizes: Gqa) -> ir.Segment:
    rank = _sizes(place, sizes)
    return segment(
        "products",
        products,
        _products(place, sizes),
        (place.input("x", place.T, place.D),),
        ("heads", "squares"),
        **{name: rank[name] for name in ("heads", "kv_heads", "head_dim")},
        **_projection_options(place, sizes),
    )


def _first(place: Place, sizes: Gqa) -> tuple[tuple[ir.Param, ...], tuple[ir.Input, ...], dict[str, Constant]]:
    """Parameters, inputs and constants of what comes in front of attention itself."""
    norms = _norms(place, sizes)
    if norms_together(place, sizes):
        qkv = place.input("heads", place.T, sum(_parts(place, sizes)))
        inputs = qkv, ir.Input("squares", (place.T, 2), place.wide_dtype)
        return norms, inputs, {"ways": place.ways, **_gate(place, sizes)}
    options = _projection_options(place, sizes) | _gate(place, sizes)
    return (*pre_gain(place), *_products(place, sizes), *norms), (place.input("h", place.T, place.D),), options


def build(place: Place, sizes: Gqa) -> ir.Segment:
    params, inputs, options = _first(place, sizes)
    return segment(
        "attention",
        gqa,
        (*params, *_attending(place, sizes), *post_gain(place)),
        (*inputs, *place.places),
        (*(("y",) if place.part else ("entered", "y")), *qk_clip.outputs(place)),
        eps=place.model.norm_eps,
        **_sizes(place, sizes),
        qk_norm=sizes.qk_norm is not None,
        **constants(sizes),
        **options,
        **_options(place, sizes),
        **entrance(place),
        **exit_of(place),
    )


def build_project(place: Place, sizes: Gqa) -> ir.Segment:
    how = constants(sizes, apart=True)
    params, inputs, options = _first(place, sizes)
    return segment(
        "project",
        project,
        params,
        (*inputs, *place.places),
        ("queries", "keys") if place.part else ("entered", "queries", "keys"),
        eps=place.model.norm_eps,
        **_sizes(place, sizes),
        qk_norm=sizes.qk_norm is not None,
        **{name: value for name, value in how.items() if name != "theta"},
        **options,
        **({"part": True} if place.part else {}),
        **entrance(place),
    )


def build_attend(place: Place, sizes: Gqa) -> ir.Segment:
    heads, kv_heads = sizes.heads // place.ways, sizes.kv_heads // place.ways
    q = place.input("queries", place.T, (2 if sizes.output_gate else 1) * heads * sizes.head_dim)
    return segment(
        "attend",
        attend,
        (*_attending(place, sizes), *post_gain(place)),
        (q, place.input("keys", place.keys, 2 * kv_heads * sizes.head_dim), *place.places),
        ("y", *qk_clip.outputs(place)),
        **_sizes(place, sizes),
        **_options(place, sizes),
        **({"eps": place.model.norm_eps} if has_post(place) else {}),
        **({"gated": True} if sizes.output_gate else {}),
        **exit_of(place),
    )


def _widths(place: Place, sizes: Gqa) -> tuple[int, ...]:
    """Columns of queries, keys and values."""
    heads, kv_heads = sizes.heads // place.ways, sizes.kv_heads // place.ways
    return heads * sizes.head_dim, kv_heads * sizes.head_dim, kv_heads * sizes.head_dim


def _parts(place: Place, sizes: Gqa) -> tuple[int, ...]:
    """Columns of queries, keys and values, and of the gate."""
    widths = _widths(place, sizes)
    return (*widths, widths[0]) if sizes.output_gate else widths


def _gate(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """The constant that says where the gate begins, if there is one."""
    return {"gate_at": sum(_widths(place, sizes))} if sizes.output_gate else {}


def _products(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of queries, keys and values, and of the gate."""
    parts = _parts(place, sizes)
    return place.rows(weights(place, "qkv", sum(parts), place.D, sizes.bias is not None), *parts)


def _norms(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The gains of queries and keys: of a head, or of all heads that a rank has."""
    if sizes.qk_norm is None:
        return ()
    if sizes.qk_norm == "head":
        return place.gain("q_norm", sizes.head_dim), place.gain("k_norm", sizes.head_dim)
    q, k, *_ = _widths(place, sizes)
    return (*place.rows((place.gain("q_norm", q),), q), *place.rows((place.gain("k_norm", k),), k))


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
        **qk_clip.constants(place),
    }
    return {name: value for name, value in options.items() if value}
