"""Multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434, §2.1.

T tokens of a micro-batch · D hidden · C rank of keys and values. Queries are of low rank too, if the model says so.
`rotation` says how the rope parts are rotated in front of attention, if it does not rotate them itself.

Where context ranks have parts of sequences, latents and rope keys are put together on all of them between two segments:
`project` makes them, and `attend` makes keys and values of those of whole sequences. Latents are much smaller than what
is made of them: 576 numbers a token in DeepSeek-V3, for 32,768 and 64.
"""

from __future__ import annotations

from typing import Any

from compiler import ir
from compiler.model.layers import indexer, qk_clip
from compiler.model.layers.builder import Place, segment
from compiler.model.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from compiler.model.layers.rotation import Rotation, constants, placed, rotated
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
    **indexer.PARAMETERS,
}


def mla(
    ops: Any,
    p: Any,
    h_TD: Any,
    *places_T: Any,
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
    index: Any = (),
    peaks: bool = False,
) -> tuple[Any, ...]:
    """h, handed through, and out(attend(q, [k_nope | v], k_rope)): keys and values from a normed latent, one rope key
    for all heads. `places_T`: where documents begin, if sequences hold several. The `part` of a tensor rank is what its
    heads add to the sum; latents are of all heads, and each rank computes them. With an `index` there is the loss of
    the indexer besides, with `peaks` the largest logit of each head."""
    x_TD = entering(ops, p, h_TD, eps, pre)
    how = sequence, heads, nope, rotation, query_scale
    query_latent, (q_T, latent_TC, k_rope_T) = _projected(ops, p, x_TD, places_T, eps, query_rank, kv_rank, *how)
    kv_T = ops.linear(ops.rmsnorm(latent_TC, p.kv_norm, eps), p.kv_up)
    attending, sizes = (q_T, kv_T, k_rope_T), (heads, nope, rope, value)
    if index:
        index_q, index_w = indexer.queries(ops, p, x_TD, query_latent, places_T, sequence, index, rotation)
        index_k = indexer.keys(ops, p, x_TD, places_T, sequence, rotation)
        o_T, more = indexer.attended(ops, (index_q, index_k, index_w), attending, places_T, sequence, index, sizes)
    else:
        inside = sequence, *sizes, theta
        o_T, more = qk_clip.attended(ops, "mla_attention", peaks, *attending, *inside, *places_T)
    y_TD = ops.linear(o_T, p.out)
    return (y_TD, *more) if part else (h_TD, leaving(ops, p, y_TD, eps, post, factor), *more)


def project(
    ops: Any,
    p: Any,
    h_TD: Any,
    *places_T: Any,
    eps: float,
    query_rank: int,
    kv_rank: int,
    sequence: int,
    heads: int,
    nope: int,
    rotation: Rotation = (),
    query_scale: float = 1.0,
    pre: bool = True,
    part: bool = False,
    index: Any = (),
) -> tuple[Any, ...]:
    """h, handed through, queries, and latents and rope keys side by side, of the rows that a context rank has. With an
    `index` its keys are beside these, and its queries and weights come last."""
    x_TD, places_T = entering(ops, p, h_TD, eps, pre), placed(places_T)
    how = sequence, heads, nope, rotation, query_scale
    query_latent, (q_T, latent_TC, k_rope_T) = _projected(ops, p, x_TD, places_T, eps, query_rank, kv_rank, *how)
    kv_T, scoring = ops.cat2(latent_TC, k_rope_T), tuple[Any, ...]()
    if index:
        scoring = indexer.queries(ops, p, x_TD, query_latent, places_T, sequence, index, rotation)
        kv_T = ops.cat2(kv_T, indexer.keys(ops, p, x_TD, places_T, sequence, rotation))
    return *(() if part else (h_TD,)), q_T, kv_T, *scoring


def attend(
    ops: Any,
    p: Any,
    q_T: Any,
    kv_K: Any,
    *given_T: Any,
    eps: float,
    kv_rank: int,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    post: bool = False,
    factor: float = 1.0,
    part: bool = False,
    index: Any = (),
    peaks: bool = False,
) -> tuple[Any, ...]:
    """out(attend(q, [k_nope | v], k_rope)) of the rows that a context rank has as queries, and of all rows K as keys
    and values, which each rank makes of the latents. With an `index` its queries and weights are given first, and its
    loss comes last; with `peaks` the largest logit of each head."""
    sizes = heads, nope, rope, value
    latent_KC, k_rope_K = ops.split2(kv_K, kv_rank)
    if index:
        k_rope_K, index_k = ops.split2(k_rope_K, rope)
    up_K = ops.linear(ops.rmsnorm(latent_KC, p.kv_norm, eps), p.kv_up)
    if index:
        (index_q, index_w, *places_T), attending = given_T, (q_T, up_K, k_rope_K)
        scoring, places = (index_q, index_k, index_w), placed(tuple(places_T))
        o_T, more = indexer.attended(ops, scoring, attending, places, sequence, index, sizes)
    else:
        how = sequence, *sizes, 0.0
        o_T, more = qk_clip.attended(ops, "mla_attention", peaks, q_T, up_K, k_rope_K, *how, *placed(given_T))
    y_TD = ops.linear(o_T, p.out)
    return (y_TD if part else leaving(ops, p, y_TD, eps, post, factor), *more)


def _projected(
    ops: Any,
    p: Any,
    x_TD: Any,
    places_T: tuple[Any, ...],
    eps: float,
    query_rank: int,
    kv_rank: int,
    sequence: int,
    heads: int,
    nope: int,
    rotation: Rotation,
    query_scale: float,
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The normed latent of queries, if there is one; and queries, latents of keys and values, and rope keys, rotated as
    far as this is done in front of attention."""
    query_latent = ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, eps) if query_rank else None
    q_T = ops.linear(query_latent, p.q_up) if query_rank else ops.linear(x_TD, p.q)
    latent_TC, k_rope_T = ops.split2(ops.linear(x_TD, p.kv_down), kv_rank)
    q_T = rotated(ops, q_T, places_T, sequence, heads, nope, rotation, query_scale)
    k_rope_T = rotated(ops, k_rope_T, places_T, sequence, 1, 0, rotation)
    return query_latent, (q_T, latent_TC, k_rope_T)


def build(place: Place, sizes: Mla) -> ir.Segment:
    nope, rope, value = sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value
    return segment(
        "attention",
        mla,
        (
            *pre_gain(place),
            *_projecting(place, sizes),
            *_attending(place, sizes),
            *indexer.weights(place, sizes.query_rank),
            *post_gain(place),
        ),
        (place.input("h", place.T, place.D), *place.places),
        (*(() if place.part else ("entered",)), "y", *indexer.losses(place), *qk_clip.outputs(place)),
        eps=place.model.norm_eps,
        query_rank=sizes.query_rank or 0,
        kv_rank=sizes.kv_rank,
        sequence=place.spec.train.sequence,
        heads=sizes.heads // place.ways,
        nope=nope,
        rope=rope,
        value=value,
        **constants(sizes, apart=indexer.indexer_of(place) is not None),
        **({"part": True} if place.part else {}),
        **qk_clip.constants(place),
        **entrance(place),
        **exit_of(place),
        **indexer.constants(place),
    )


def build_project(place: Place, sizes: Mla) -> ir.Segment:
    how = constants(sizes, apart=True)
    return segment(
        "project",
        project,
        (*pre_gain(place), *_projecting(place, sizes), *indexer.weights(place, sizes.query_rank)),
        (place.input("h", place.T, place.D), *place.places),
        (*(() if place.part else ("entered",)), "queries", "keys", *(each.name for each in indexer.scoring(place))),
        eps=place.model.norm_eps,
        query_rank=sizes.query_rank or 0,
        kv_rank=sizes.kv_rank,
        sequence=place.spec.train.sequence,
        heads=sizes.heads // place.ways,
        nope=sizes.head_dim.nope,
        **{name: given for name, given in how.items() if name != "theta"},
        **({"part": True} if place.part else {}),
        **entrance(place),
        **indexer.constants(place),
    )


def build_attend(place: Place, sizes: Mla) -> ir.Segment:
    nope, rope, value = sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value
    heads = sizes.heads // place.ways
    q = place.input("queries", place.T, heads * (nope + rope))
    chooses = indexer.indexer_of(place)
    keys = sizes.kv_rank + rope + (chooses.head_dim if chooses else 0)
    return segment(
        "attend",
        attend,
        (*_attending(place, sizes), *post_gain(place)),
        (q, place.input("keys", place.keys, keys), *indexer.scoring(place), *place.places),
        ("y", *indexer.losses(place), *qk_clip.outputs(place)),
        eps=place.model.norm_eps,
        kv_rank=sizes.kv_rank,
        sequence=place.spec.train.sequence,
        heads=heads,
        nope=nope,
        rope=rope,
        value=value,
        **({"part": True} if place.part else {}),
        **qk_clip.constants(place),
        **exit_of(place),
        **indexer.constants(place),
    )


def _projecting(place: Place, sizes: Mla) -> tuple[ir.Param, ...]:
    """The parameters of queries, and of latents of keys and values."""
    D, nope, rope = place.D, sizes.head_dim.nope, sizes.head_dim.rope
    query_width = sizes.heads // place.ways * (nope + rope)
    query: tuple[ir.Param, ...] = place.rows((place.weight("q", query_width, D),), query_width)
    if sizes.query_rank:
        query = (
            place.weight("q_down", sizes.query_rank, D),
            place.gain("q_norm", sizes.query_rank),
            *place.rows((place.weight("q_up", query_width, sizes.query_rank),), query_width),
        )
    return *query, place.weight("kv_down", sizes.kv_rank + rope, D)


def _attending(place: Place, sizes: Mla) -> tuple[ir.Param, ...]:
    """The parameters of keys and values of latents, and of what comes behind attention."""
    heads, value = sizes.heads // place.ways, sizes.head_dim.value
    kv_width = heads * (sizes.head_dim.nope + value)
    return (
        place.gain("kv_norm", sizes.kv_rank),
        *place.rows((place.weight("kv_up", kv_width, sizes.kv_rank),), kv_width),
        *place.columns((place.weight("out", place.D, heads * value),)),
    )
