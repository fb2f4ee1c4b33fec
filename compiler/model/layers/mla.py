"""Multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434, §2.1.

    c_q         = norm(x W_q_down)              the latent of queries, if the model has one; else c_q = x
    q           = c_q W_q_up                    per head [nope | rope]
    c_kv, k_r   = split(x W_kv_down)            the latent of keys and values, and one rope key for all heads
    k_i, v_i    = split(norm(c_kv) W_kv_up)     for each head i
    o_i         = softmax((q_i · [k_i | rotate(k_r)]) / √d) v_i,   q_i with its rope part rotated
    y           = o W_out

T tokens of a micro-batch · D hidden · C rank of keys and values · K tokens of all context ranks. With an indexer
(compiler/model/layers/indexer.py) each query attends to the keys that the indexer chooses.

`MlaAttention` is one segment. Under context parallelism `MlaProject` and `MlaAttend` are two. Latents and rope keys are
all-gathered between them, and `MlaAttend` computes the keys and values of whole sequences from them. Latents are much
smaller: in DeepSeek-V3 a latent and a rope key have 576 numbers per token, keys and values 32,768 and rope keys 64.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import indexer, qk_clip
from compiler.model.layers.builder import Constant, Place, segment_of
from compiler.model.layers.indexer import Index
from compiler.model.layers.residual import (
    entrance,
    exit_of,
    in_stream,
    out_of_stream,
    post_gain,
    pre_gain,
    through_stream,
)
from compiler.model.layers.rotation import Rotate, query_key_rotation, starts_and_positions
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
Values = tuple[Any, ...]


@dataclass(frozen=True)
class LatentHeads:
    """The heads of a tensor rank."""

    heads: int
    nope: int  # columns of a query or key head that are not rotated
    rope: int  # columns that are
    value: int  # columns of a value head


@dataclass(frozen=True)
class MlaProjection:
    """Queries, latents of keys and values, and rope keys, rotated unless attention does so itself.

    query_rank: rank of the latent of queries, 0 if there is none. query_scale: a factor of queries.
    """

    eps: float
    query_rank: int
    kv_rank: int
    heads: LatentHeads
    rotate: Rotate
    query_scale: float = 1.0

    def __call__(self, ops: Any, p: Any, x_TD: Any, places_T: Values) -> tuple[Any, Any, Any, Any]:
        """Return q, the latent of keys and values, rope keys, and the normed latent of queries or None."""
        query_latent = ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, self.eps) if self.query_rank else None
        q_T = ops.linear(query_latent, p.q_up) if self.query_rank else ops.linear(x_TD, p.q)
        latent_TC, k_rope_T = ops.split2(ops.linear(x_TD, p.kv_down), self.kv_rank)
        q_T = self.rotate(ops, q_T, places_T, self.heads.heads, self.heads.nope, self.query_scale)
        k_rope_T = self.rotate(ops, k_rope_T, places_T, 1)
        return q_T, latent_TC, k_rope_T, query_latent


@dataclass(frozen=True)
class MlaSoftmax:
    """Causal attention. It rotates the rope parts itself unless theta is 0. Besides its output it returns the largest
    logit of each head with `peaks`, or the loss of the indexer with an `index`."""

    sequence: int
    heads: LatentHeads
    theta: float
    peaks: bool
    index: Index | None = None

    def __call__(
        self, ops: Any, q_T: Any, kv_K: Any, k_rope_K: Any, scoring: Values, places_T: Values
    ) -> tuple[Any, Values]:
        """scoring: queries, keys and weights of the indexer."""
        sizes = self.heads.heads, self.heads.nope, self.heads.rope, self.heads.value
        if self.index:
            return indexer.attend(ops, self.index, scoring, (q_T, kv_K, k_rope_K), places_T, self.sequence, sizes)
        inside = self.sequence, *sizes, self.theta
        return qk_clip.attend(ops, "mla_attention", self.peaks, q_T, kv_K, k_rope_K, *inside, *places_T)


@dataclass(frozen=True)
class MlaAttention:
    """x → y, and the further results of attention."""

    project: MlaProjection
    attend: MlaSoftmax

    def __call__(self, ops: Any, p: Any, x_TD: Any, *places_T: Any) -> Values:
        project, index = self.project, self.attend.index
        q_T, latent_TC, k_rope_T, query_latent = project(ops, p, x_TD, places_T)
        kv_T = ops.linear(ops.rmsnorm(latent_TC, p.kv_norm, project.eps), p.kv_up)
        scoring: Values = ()
        if index:
            index_q, index_w = indexer.queries(ops, p, x_TD, query_latent, places_T, index, project.rotate)
            scoring = index_q, indexer.keys(ops, p, x_TD, places_T, project.rotate), index_w
        o_T, extras = self.attend(ops, q_T, kv_T, k_rope_T, scoring, places_T)
        return ops.linear(o_T, p.out), *extras


@dataclass(frozen=True)
class MlaProject:
    """x of a context rank → queries and [latents | rope keys]. With an `index`, the indexer's keys are concatenated to
    the latter, and its queries and weights come last."""

    project: MlaProjection
    index: Index | None = None

    def __call__(self, ops: Any, p: Any, x_TD: Any, *places_T: Any) -> Values:
        q_T, latent_TC, k_rope_T, query_latent = self.project(ops, p, x_TD, places_T)
        kv_T, scoring, rotate = ops.cat2(latent_TC, k_rope_T), tuple[Any, ...](), self.project.rotate
        if self.index:
            scoring = indexer.queries(ops, p, x_TD, query_latent, places_T, self.index, rotate)
            kv_T = ops.cat2(kv_T, indexer.keys(ops, p, x_TD, places_T, rotate))
        return q_T, kv_T, *scoring


@dataclass(frozen=True)
class MlaAttend:
    """Queries of a context rank, and latents of all context ranks → y. With an `index`, the indexer's queries and
    weights are the first of the other inputs."""

    eps: float
    kv_rank: int
    attend: MlaSoftmax

    def __call__(self, ops: Any, p: Any, q_T: Any, kv_K: Any, *rest_T: Any) -> Values:
        latent_KC, k_rope_K = ops.split2(kv_K, self.kv_rank)
        scoring: Values = ()
        if self.attend.index:
            k_rope_K, index_k = ops.split2(k_rope_K, self.attend.heads.rope)
        up_K = ops.linear(ops.rmsnorm(latent_KC, p.kv_norm, self.eps), p.kv_up)
        if self.attend.index:
            (index_q, index_w), rest_T = rest_T[:2], rest_T[2:]
            scoring = index_q, index_k, index_w
        o_T, extras = self.attend(ops, q_T, up_K, k_rope_K, scoring, starts_and_positions(rest_T))
        return ops.linear(o_T, p.out), *extras


# ---------------------------------------------------------------- at a place in the model


def build(place: Place, sizes: Mla) -> ir.Segment:
    """The segment of multi-head latent attention: h (T·D) -> the residual stream and the value to add to it, both T·D,
    and the loss of the indexer if there is one. A tensor-parallel shard takes normed rows, and returns only its part of
    the value."""
    turn = query_key_rotation(sizes, apart=indexer.indexer_of(place) is not None)
    attention = MlaAttention(_projection(place, sizes, apart=False), _softmax(place, sizes, turn.theta))
    return segment_of(
        "attention",
        attention if place.is_tensor_shard else through_stream(place, attention),
        (
            *pre_gain(place),
            *_projecting(place, sizes),
            *_attending(place, sizes),
            *indexer.weights(place, sizes.query_rank),
            *post_gain(place),
        ),
        (place.input("h", place.T, place.D), *place.places),
        (*(() if place.is_tensor_shard else ("entered",)), "y", *indexer.losses(place), *qk_clip.outputs(place)),
        {"eps": place.model.norm_eps, **_ranks(sizes), "sequence": place.spec.train.sequence}
        | asdict(_heads(place, sizes))
        | turn.constants
        | ({"part": True} if place.is_tensor_shard else {})
        | qk_clip.constants(place)
        | entrance(place)
        | exit_of(place)
        | indexer.constants(place),
    )


def build_project(place: Place, sizes: Mla) -> ir.Segment:
    """The segment before the gather of latents under context parallelism: h (T·D) -> the residual stream, queries,
    [latents | RoPE keys], and the tensors of the indexer if there is one."""
    turn = {name: value for name, value in query_key_rotation(sizes, apart=True).constants.items() if name != "theta"}
    heads = _heads(place, sizes)
    project = MlaProject(_projection(place, sizes, apart=True), indexer.index_of(place))
    return segment_of(
        "project",
        project if place.is_tensor_shard else in_stream(place, project),
        (*pre_gain(place), *_projecting(place, sizes), *indexer.weights(place, sizes.query_rank)),
        (place.input("h", place.T, place.D), *place.places),
        (
            *(() if place.is_tensor_shard else ("entered",)),
            "queries",
            "keys",
            *(tensor.name for tensor in indexer.scoring(place)),
        ),
        {"eps": place.model.norm_eps, **_ranks(sizes), "sequence": place.spec.train.sequence}
        | {"heads": heads.heads, "nope": heads.nope}
        | turn
        | ({"part": True} if place.is_tensor_shard else {})
        | entrance(place)
        | indexer.constants(place),
    )


def build_attend(place: Place, sizes: Mla) -> ir.Segment:
    """The segment after the gather of latents: queries of T tokens and latents of all context ranks -> the value to add
    to the residual stream (T·D), and the loss of the indexer if there is one."""
    heads, index = _heads(place, sizes), indexer.indexer_of(place)
    q = place.input("queries", place.T, heads.heads * (heads.nope + heads.rope))
    keys = sizes.kv_rank + heads.rope + (index.head_dim if index else 0)
    attend = MlaAttend(place.model.norm_eps, sizes.kv_rank, _softmax(place, sizes, 0.0))
    return segment_of(
        "attend",
        attend if place.is_tensor_shard else out_of_stream(place, attend),
        (*_attending(place, sizes), *post_gain(place)),
        (q, place.input("keys", place.keys, keys), *indexer.scoring(place), *place.places),
        ("y", *indexer.losses(place), *qk_clip.outputs(place)),
        {"eps": place.model.norm_eps, "kv_rank": sizes.kv_rank, "sequence": place.spec.train.sequence}
        | asdict(heads)
        | ({"part": True} if place.is_tensor_shard else {})
        | qk_clip.constants(place)
        | exit_of(place)
        | indexer.constants(place),
    )


def _heads(place: Place, sizes: Mla) -> LatentHeads:
    return LatentHeads(
        sizes.heads // place.tensor_shards, sizes.head_dim.nope, sizes.head_dim.rope, sizes.head_dim.value
    )


def _ranks(sizes: Mla) -> dict[str, Constant]:
    return {"query_rank": sizes.query_rank or 0, "kv_rank": sizes.kv_rank}


def _projection(place: Place, sizes: Mla, *, apart: bool) -> MlaProjection:
    """`apart`: queries and keys are of different rows, as under context parallelism."""
    turn = query_key_rotation(sizes, apart=apart or indexer.indexer_of(place) is not None)
    rotate = Rotate(place.spec.train.sequence, turn.angles, apart)
    heads = _heads(place, sizes)
    return MlaProjection(place.model.norm_eps, sizes.query_rank or 0, sizes.kv_rank, heads, rotate, turn.query_scale)


def _softmax(place: Place, sizes: Mla, theta: float) -> MlaSoftmax:
    heads, sequence = _heads(place, sizes), place.spec.train.sequence
    return MlaSoftmax(sequence, heads, theta, qk_clip.is_clipped(place), indexer.index_of(place))


def _projecting(place: Place, sizes: Mla) -> tuple[ir.Param, ...]:
    """The parameters of the projections to queries and to latents of keys and values."""
    D, heads = place.D, _heads(place, sizes)
    query_width = heads.heads * (heads.nope + heads.rope)
    query: tuple[ir.Param, ...] = place.rows((place.weight("q", query_width, D),), query_width)
    if sizes.query_rank:
        query = (
            place.weight("q_down", sizes.query_rank, D),
            place.gain("q_norm", sizes.query_rank),
            *place.rows((place.weight("q_up", query_width, sizes.query_rank),), query_width),
        )
    return *query, place.weight("kv_down", sizes.kv_rank + heads.rope, D)


def _attending(place: Place, sizes: Mla) -> tuple[ir.Param, ...]:
    """The parameters from latents to keys and values, and of the output projection."""
    heads = _heads(place, sizes)
    kv_width = heads.heads * (heads.nope + heads.value)
    return (
        place.gain("kv_norm", sizes.kv_rank),
        *place.rows((place.weight("kv_up", kv_width, sizes.kv_rank),), kv_width),
        *place.columns((place.weight("out", place.D, heads.heads * heads.value),)),
    )
