"""Grouped-query attention. Source: Ainslie et al., "GQA", arXiv 2305.13245.

    q, k, v = split(x W_qkv)                      heads of queries, then of keys, then of values
    q, k    = rotate(norm(q)), rotate(norm(k))    norms with `qk_norm`; rotation: compiler/model/layers/rotation.py
    o_i     = softmax(q_i k_jᵀ / √d) v_j          for query head i, where j = i // (heads / kv_heads)
    y       = (o · sigmoid(gate)) W_out           the gate, if there is one, is more columns of W_qkv

T tokens of a micro-batch · D hidden · K tokens of all context ranks. Norms are per head as in Qwen3, arXiv 2505.09388,
or over all heads together as in OLMoE, arXiv 2409.02060. The gate is that of Qwen3-Next.

`GqaAttention` is one segment. Under context parallelism `GqaProject` and `GqaAttend` are two, and keys and values are
all-gathered between them. If heads that are normed together are spread over tensor ranks, `products` is a segment
before these, and the squares that it returns are all-reduced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import qk_clip
from compiler.model.layers.builder import Constant, Place, add_bias_paths, linear, segment, segment_of, weights
from compiler.model.layers.residual import (
    entrance,
    exit_of,
    has_post,
    in_stream,
    out_of_stream,
    post_gain,
    pre_gain,
    through_stream,
)
from compiler.model.layers.rotation import Rotate, query_key_rotation, starts_and_positions
from dsl.schema import Gqa

NAMES = ("norm", "qkv", "q_norm", "k_norm", "sinks", "out", "post_norm")
PARAMETERS = add_bias_paths({name: f"attention.{name}" for name in NAMES}, "qkv", "out")
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Heads:
    """The heads of a tensor rank."""

    sequence: int  # tokens of a sequence
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads, as many as of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of queries, keys and values in the fused projection."""
        return self.queries, self.keys, self.keys


# ---------------------------------------------------------------- x → q, k, v


@dataclass(frozen=True)
class HeadNorms:
    """Norms over as many columns as the gains have: per head, or over all heads."""

    eps: float

    def __call__(self, ops: Any, p: Any, q_T: Any, k_T: Any, squares_T: Values) -> tuple[Any, Any]:
        return ops.head_rmsnorm(q_T, p.q_norm, self.eps), ops.head_rmsnorm(k_T, p.k_norm, self.eps)


@dataclass(frozen=True)
class SharedNorms:
    """Norms over the heads of all tensor ranks, from the summed squares. widths: columns of all queries, of all
    keys."""

    eps: float
    widths: tuple[int, int]

    def __call__(self, ops: Any, p: Any, q_T: Any, k_T: Any, squares_T: Values) -> tuple[Any, Any]:
        q_T = ops.shared_rmsnorm(q_T, p.q_norm, squares_T[0], self.widths[0], self.eps)
        return q_T, ops.shared_rmsnorm(k_T, p.k_norm, squares_T[1], self.widths[1], self.eps)


@dataclass(frozen=True)
class GqaProjection:
    """Queries, keys and values, normed, and rotated unless attention does so itself.

    With SharedNorms the projection and its squares are inputs. query_scale: a factor of queries.
    """

    sizes: Heads
    biased: bool
    gated: bool
    norms: HeadNorms | SharedNorms | None
    rotate: Rotate
    query_scale: float = 1.0

    def __call__(self, ops: Any, p: Any, x_TD: Any, rest_T: Values) -> tuple[Any, Any, Any, Values, Values]:
        """Return q, k, v, the gate if there is one, and the positions (`Place.places`). `rest`: the squares if norms
        are shared, then the positions."""
        sizes = self.sizes
        if isinstance(self.norms, SharedNorms):
            qkv_T, squares_T, places_T = x_TD, ops.split2(rest_T[0], 1), rest_T[1:]
        else:
            qkv_T, squares_T, places_T = linear(ops, p, "qkv", x_TD, self.biased), (), rest_T
        qkv_T, *gate_T = ops.split2(qkv_T, sum(sizes.columns)) if self.gated else (qkv_T,)
        q_T, kv_T = ops.split2(qkv_T, sizes.queries)
        k_T, v_T = ops.split2(kv_T, sizes.keys)
        q_T, k_T = self.norms(ops, p, q_T, k_T, squares_T) if self.norms else (q_T, k_T)
        q_T = self.rotate(ops, q_T, places_T, sizes.heads, scale=self.query_scale)
        k_T = self.rotate(ops, k_T, places_T, sizes.kv_heads)
        return q_T, k_T, v_T, tuple(gate_T), places_T


def products(ops: Any, p: Any, x_TD: Any, *, heads: int, kv_heads: int, head_dim: int, biased: bool = False) -> Values:
    """The concatenated queries, keys and values of a tensor rank, and the squares of its queries and of its keys."""
    qkv_T = linear(ops, p, "qkv", x_TD, biased)
    return qkv_T, ops.two_squares(qkv_T, heads * head_dim, kv_heads * head_dim)


# ---------------------------------------------------------------- q, k, v → o → y


@dataclass(frozen=True)
class GqaSoftmax:
    """Causal attention. It rotates whole heads itself unless theta is 0. peaks: also return the largest logit of each
    head."""

    sizes: Heads
    theta: float
    peaks: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, k_K: Any, v_K: Any, places_T: Values) -> tuple[Any, Values]:
        sizes = self.sizes.sequence, self.sizes.heads, self.sizes.kv_heads, self.theta
        return qk_clip.attend(ops, "gqa_attention", self.peaks, q_T, k_K, v_K, *sizes, *places_T)


@dataclass(frozen=True)
class BoundedSoftmax(GqaSoftmax):
    """Causal attention over a window of keys, with a softcap of logits, or with a sink per head."""

    window: int
    softcap: float
    sinks: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, k_K: Any, v_K: Any, places_T: Values) -> tuple[Any, Values]:
        sizes = self.sizes.sequence, self.sizes.heads, self.sizes.kv_heads, self.theta
        bounds = p.sinks if self.sinks else None, *sizes, self.window, self.softcap
        return qk_clip.attend(ops, "bounded_attention", self.peaks, q_T, k_K, v_K, *bounds, *places_T)


@dataclass(frozen=True)
class GqaAttention:
    """x → y and, if requested, the largest logits."""

    project: GqaProjection
    attend: GqaSoftmax
    out_biased: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any, *rest_T: Any) -> Values:
        q_T, k_T, v_T, gate_T, places_T = self.project(ops, p, x_TD, rest_T)
        o_T, peaks_H = self.attend(ops, p, q_T, k_T, v_T, places_T)
        return linear(ops, p, "out", apply_gate(ops, o_T, gate_T), self.out_biased), *peaks_H


@dataclass(frozen=True)
class GqaProject:
    """x of a context rank → [queries | gate, if there is one] and [keys | values]."""

    project: GqaProjection

    def __call__(self, ops: Any, p: Any, x_TD: Any, *rest_T: Any) -> Values:
        q_T, k_T, v_T, gate_T, _ = self.project(ops, p, x_TD, rest_T)
        return ops.cat2(q_T, *gate_T) if gate_T else q_T, ops.cat2(k_T, v_T)


@dataclass(frozen=True)
class GqaAttend:
    """Queries of a context rank, and keys and values of all context ranks → y."""

    attend: GqaSoftmax
    gated: bool
    out_biased: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, kv_K: Any, *places_T: Any) -> Values:
        sizes = self.attend.sizes
        q_T, *gate_T = ops.split2(q_T, sizes.queries) if self.gated else (q_T,)
        k_K, v_K = ops.split2(kv_K, sizes.keys)
        o_T, peaks_H = self.attend(ops, p, q_T, k_K, v_K, starts_and_positions(places_T))
        return linear(ops, p, "out", apply_gate(ops, o_T, tuple(gate_T)), self.out_biased), *peaks_H


def apply_gate(ops: Any, o_T: Any, gate_T: Values) -> Any:
    """o times the sigmoid of the gate, if there is one."""
    return ops.gate_columns(o_T, *gate_T, False) if gate_T else o_T


# ---------------------------------------------------------------- at a place in the model


def norms_across_ranks(place: Place, sizes: Gqa) -> bool:
    """Whether heads that are normed together are spread over several ranks."""
    return sizes.qk_norm == "width" and place.tensor_shards > 1


def build_products(place: Place, sizes: Gqa) -> ir.Segment:
    """The segment that projects x (T·D) to concatenated queries, keys and values and sums their squares, for norms over
    heads of several tensor ranks."""
    heads = _heads(place, sizes)
    return segment(
        "products",
        products,
        _products(place, sizes),
        (place.input("x", place.T, place.D),),
        ("heads", "squares"),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        **_bias_constants(sizes),
    )


def build(place: Place, sizes: Gqa) -> ir.Segment:
    """The segment of MHA, GQA or MQA: h (T·D) -> the residual stream and the value to add to it, both T·D, and with QK-
    clip the largest logit of each head. A tensor-parallel shard takes normed rows, and returns only its part of the
    value."""
    params, inputs, options = _first(place, sizes)
    turn = query_key_rotation(sizes)
    attention = GqaAttention(_projection(place, sizes), _softmax(place, sizes, turn.theta), _has_out_bias(place, sizes))
    return segment_of(
        "attention",
        attention if place.is_tensor_shard else through_stream(place, attention),
        (*params, *_attending(place, sizes), *post_gain(place)),
        (*inputs, *place.places),
        (*(("y",) if place.is_tensor_shard else ("entered", "y")), *qk_clip.outputs(place)),
        {"eps": place.model.norm_eps, **_sizes(place, sizes), "qk_norm": sizes.qk_norm is not None}
        | turn.constants
        | options
        | _options(place, sizes)
        | entrance(place)
        | exit_of(place),
    )


def build_project(place: Place, sizes: Gqa) -> ir.Segment:
    """The segment before the gather of keys under context parallelism: h (T·D) -> the residual stream, [queries | gate]
    and [keys | values]."""
    params, inputs, options = _first(place, sizes)
    turn = {name: value for name, value in query_key_rotation(sizes, apart=True).constants.items() if name != "theta"}
    project = GqaProject(_projection(place, sizes, apart=True))
    return segment_of(
        "project",
        project if place.is_tensor_shard else in_stream(place, project),
        params,
        (*inputs, *place.places),
        ("queries", "keys") if place.is_tensor_shard else ("entered", "queries", "keys"),
        {"eps": place.model.norm_eps, **_sizes(place, sizes), "qk_norm": sizes.qk_norm is not None}
        | turn
        | options
        | ({"part": True} if place.is_tensor_shard else {})
        | entrance(place),
    )


def build_attend(place: Place, sizes: Gqa) -> ir.Segment:
    """The segment after the gather of keys: queries of T tokens and keys and values of all context ranks -> the value
    to add to the residual stream (T·D)."""
    heads = _heads(place, sizes)
    attend = GqaAttend(_softmax(place, sizes, 0.0), sizes.output_gate, _has_out_bias(place, sizes))
    return segment_of(
        "attend",
        attend if place.is_tensor_shard else out_of_stream(place, attend),
        (*_attending(place, sizes), *post_gain(place)),
        (
            place.input("queries", place.T, (2 if sizes.output_gate else 1) * heads.queries),
            place.input("keys", place.keys, 2 * heads.keys),
            *place.places,
        ),
        ("y", *qk_clip.outputs(place)),
        _sizes(place, sizes)
        | _options(place, sizes)
        | ({"eps": place.model.norm_eps} if has_post(place) else {})
        | ({"gated": True} if sizes.output_gate else {})
        | exit_of(place),
    )


def _heads(place: Place, sizes: Gqa) -> Heads:
    heads, kv_heads = sizes.heads // place.tensor_shards, sizes.kv_heads // place.tensor_shards
    return Heads(place.spec.train.sequence, heads, kv_heads, sizes.head_dim)


def _projection(place: Place, sizes: Gqa, apart: bool = False) -> GqaProjection:
    """`apart`: queries and keys are of different rows, so attention does not rotate them."""
    heads, eps, turn = _heads(place, sizes), place.model.norm_eps, query_key_rotation(sizes, apart)
    norms: HeadNorms | SharedNorms | None = HeadNorms(eps) if sizes.qk_norm else None
    if norms_across_ranks(place, sizes):
        norms = SharedNorms(eps, (place.tensor_shards * heads.queries, place.tensor_shards * heads.keys))
    rotate = Rotate(heads.sequence, turn.angles, apart)
    return GqaProjection(heads, sizes.bias is not None, sizes.output_gate, norms, rotate, turn.query_scale)


def _softmax(place: Place, sizes: Gqa, theta: float) -> GqaSoftmax:
    heads, peaks = _heads(place, sizes), qk_clip.is_clipped(place)
    if not _is_bounded(sizes):
        return GqaSoftmax(heads, theta, peaks)
    return BoundedSoftmax(heads, theta, peaks, sizes.window or 0, sizes.softcap or 0.0, sizes.sinks)


def _is_bounded(sizes: Gqa) -> bool:
    return sizes.window is not None or sizes.softcap is not None or sizes.sinks


def _has_out_bias(place: Place, sizes: Gqa) -> bool:
    """Whether the output projection adds its bias. On a tensor-parallel shard the bias is added after the sum over
    ranks."""
    return sizes.bias == "all" and not place.is_tensor_shard


# ---------------------------------------------------------------- parameters


def _first(place: Place, sizes: Gqa) -> tuple[tuple[ir.Param, ...], tuple[ir.Input, ...], dict[str, Constant]]:
    """Parameters, inputs and constants of the steps before attention."""
    norms = _norms(place, sizes)
    gate: dict[str, Constant] = {"gate_at": sum(_heads(place, sizes).columns)} if sizes.output_gate else {}
    if norms_across_ranks(place, sizes):
        qkv = place.input("heads", place.T, sum(_columns(place, sizes)))
        squares = ir.Input("squares", (place.T, 2), place.wide_dtype)
        return norms, (qkv, squares), {"ways": place.tensor_shards, **gate}
    h = place.input("h", place.T, place.D)
    return (*pre_gain(place), *_products(place, sizes), *norms), (h,), _bias_constants(sizes) | gate


def _columns(place: Place, sizes: Gqa) -> tuple[int, ...]:
    """Columns of queries, keys, values and the gate, if there is one."""
    heads = _heads(place, sizes)
    return (*heads.columns, *((heads.queries,) if sizes.output_gate else ()))


def _products(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of the projection of queries, keys, values and the gate."""
    columns = _columns(place, sizes)
    return place.rows(weights(place, "qkv", sum(columns), place.D, sizes.bias is not None), *columns)


def _norms(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The gains of queries and keys: for one head, or for all heads of a rank."""
    if sizes.qk_norm is None:
        return ()
    if sizes.qk_norm == "head":
        return place.gain("q_norm", sizes.head_dim), place.gain("k_norm", sizes.head_dim)
    q, k = _heads(place, sizes).queries, _heads(place, sizes).keys
    return (*place.rows((place.gain("q_norm", q),), q), *place.rows((place.gain("k_norm", k),), k))


def _attending(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of attention and of the output projection."""
    heads = _heads(place, sizes)
    sinks = (place.vector("sinks", heads.heads, place.model.init_std),) if sizes.sinks else ()
    return (
        *place.rows(sinks, heads.heads),
        *place.columns(weights(place, "out", place.D, heads.queries, _has_out_bias(place, sizes))),
    )


# ---------------------------------------------------------------- constants that emitted segments print


def _sizes(place: Place, sizes: Gqa) -> dict[str, Constant]:
    return asdict(_heads(place, sizes))


def _bias_constants(sizes: Gqa) -> dict[str, Constant]:
    return {"biased": True} if sizes.bias is not None else {}


def _options(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """Constants of features beyond plain attention, if the model has them."""
    options = {
        "out_biased": _has_out_bias(place, sizes),
        "bounded": _is_bounded(sizes),
        "window": sizes.window or 0,
        "softcap": sizes.softcap or 0.0,
        "sinks": sizes.sinks,
        "part": place.is_tensor_shard,
        **qk_clip.constants(place),
    }
    return {name: value for name, value in options.items() if value}
