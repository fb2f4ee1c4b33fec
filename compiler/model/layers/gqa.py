"""Grouped-query attention. Source: Ainslie et al., "GQA", arXiv 2305.13245.

    q, k, v = split(x W_qkv)                      heads of queries, then of keys, then of values
    q, k    = rotate(norm(q)), rotate(norm(k))    norms with `qk_norm`; rotation: compiler/model/layers/rotation.py
    o_i     = softmax(q_i k_jᵀ / √d) v_j          of query head i, where j = i // (heads / kv_heads)
    y       = (o · sigmoid(gate)) W_out           the gate, if there is one, is more columns of W_qkv

T tokens of a micro-batch · D hidden · K tokens of all context ranks. Norms are head by head as in Qwen3, arXiv
2505.09388, or of all heads as one as in OLMoE, arXiv 2409.02060. The gate is that of Qwen3-Next.

`GqaAttention` is one segment. Where context ranks have parts of sequences, `GqaProject` and `GqaAttend` are two, and
keys and values are put together on all ranks in between. Where tensor ranks have heads that are normed as one,
`products` is a segment in front of these, and the ranks add up the squares that it returns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compiler import ir
from compiler.model.layers import qk_clip
from compiler.model.layers.builder import Constant, Place, linear, named, segment, segment_of, weights
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
from compiler.model.layers.rotation import Rotate, placed, turning
from dsl.schema import Gqa

NAMES = ("norm", "qkv", "q_norm", "k_norm", "sinks", "out", "post_norm")
PARAMETERS = named({name: f"attention.{name}" for name in NAMES}, "qkv", "out")
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Heads:
    """The heads of a tensor rank, and the tokens of a sequence."""

    sequence: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads; value heads have as many."""
        return self.kv_heads * self.head_dim

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns of queries, keys and values in their product."""
        return self.queries, self.keys, self.keys


# ---------------------------------------------------------------- x → q, k, v


@dataclass(frozen=True)
class HeadNorms:
    """Norms of as many columns as their gains have: of each head, or of all heads."""

    eps: float

    def __call__(self, ops: Any, p: Any, q_T: Any, k_T: Any, squares_T: Values) -> tuple[Any, Any]:
        return ops.head_rmsnorm(q_T, p.q_norm, self.eps), ops.head_rmsnorm(k_T, p.k_norm, self.eps)


@dataclass(frozen=True)
class SharedNorms:
    """Norms of the heads of all tensor ranks, whose squares are given. widths: columns of all queries, of all keys."""

    eps: float
    widths: tuple[int, int]

    def __call__(self, ops: Any, p: Any, q_T: Any, k_T: Any, squares_T: Values) -> tuple[Any, Any]:
        q_T = ops.shared_rmsnorm(q_T, p.q_norm, squares_T[0], self.widths[0], self.eps)
        return q_T, ops.shared_rmsnorm(k_T, p.k_norm, squares_T[1], self.widths[1], self.eps)


@dataclass(frozen=True)
class GqaProjection:
    """Queries, keys and values, normed and rotated as far as attention does not do it itself.

    With SharedNorms their product is given, and so are its squares. query_scale: what queries are multiplied by.
    """

    sizes: Heads
    biased: bool
    gated: bool
    norms: HeadNorms | SharedNorms | None
    rotate: Rotate
    query_scale: float = 1.0

    def __call__(self, ops: Any, p: Any, x_TD: Any, rest_T: Values) -> tuple[Any, Any, Any, Values, Values]:
        """q, k, v; the gate, if there is one; and where tokens stand, which are behind the squares of `rest`."""
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
    """Queries, keys and values of a tensor rank side by side, and the squares of its queries and of its keys."""
    qkv_T = linear(ops, p, "qkv", x_TD, biased)
    return qkv_T, ops.two_squares(qkv_T, heads * head_dim, kv_heads * head_dim)


# ---------------------------------------------------------------- q, k, v → o → y


@dataclass(frozen=True)
class GqaSoftmax:
    """Causal attention, which rotates whole heads itself unless theta is 0. peaks: with the largest logit of each."""

    sizes: Heads
    theta: float
    peaks: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, k_K: Any, v_K: Any, places_T: Values) -> tuple[Any, Values]:
        sizes = self.sizes.sequence, self.sizes.heads, self.sizes.kv_heads, self.theta
        return qk_clip.attended(ops, "gqa_attention", self.peaks, q_T, k_K, v_K, *sizes, *places_T)


@dataclass(frozen=True)
class BoundedSoftmax(GqaSoftmax):
    """The same over a window of keys, with logits that are capped, or with a sink for each head."""

    window: int
    softcap: float
    sinks: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, k_K: Any, v_K: Any, places_T: Values) -> tuple[Any, Values]:
        sizes = self.sizes.sequence, self.sizes.heads, self.sizes.kv_heads, self.theta
        bounds = p.sinks if self.sinks else None, *sizes, self.window, self.softcap
        return qk_clip.attended(ops, "bounded_attention", self.peaks, q_T, k_K, v_K, *bounds, *places_T)


@dataclass(frozen=True)
class GqaAttention:
    """y of x, and behind it the largest logits, if there are to be some."""

    project: GqaProjection
    attend: GqaSoftmax
    out_biased: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any, *rest_T: Any) -> Values:
        q_T, k_T, v_T, gate_T, places_T = self.project(ops, p, x_TD, rest_T)
        o_T, peaks_H = self.attend(ops, p, q_T, k_T, v_T, places_T)
        return linear(ops, p, "out", gated(ops, o_T, gate_T), self.out_biased), *peaks_H


@dataclass(frozen=True)
class GqaProject:
    """The queries of a context rank, with the gate behind them if there is one, and its keys and values as one."""

    project: GqaProjection

    def __call__(self, ops: Any, p: Any, x_TD: Any, *rest_T: Any) -> Values:
        q_T, k_T, v_T, gate_T, _ = self.project(ops, p, x_TD, rest_T)
        return ops.cat2(q_T, *gate_T) if gate_T else q_T, ops.cat2(k_T, v_T)


@dataclass(frozen=True)
class GqaAttend:
    """y of the queries of a context rank, and of the keys and values of all."""

    attend: GqaSoftmax
    gated: bool
    out_biased: bool

    def __call__(self, ops: Any, p: Any, q_T: Any, kv_K: Any, *places_T: Any) -> Values:
        sizes = self.attend.sizes
        q_T, *gate_T = ops.split2(q_T, sizes.queries) if self.gated else (q_T,)
        k_K, v_K = ops.split2(kv_K, sizes.keys)
        o_T, peaks_H = self.attend(ops, p, q_T, k_K, v_K, placed(places_T))
        return linear(ops, p, "out", gated(ops, o_T, tuple(gate_T)), self.out_biased), *peaks_H


def gated(ops: Any, o_T: Any, gate_T: Values) -> Any:
    """o times the sigmoid of its gate, if there is one."""
    return ops.gate_columns(o_T, *gate_T, False) if gate_T else o_T


# ---------------------------------------------------------------- at a place in the model


def norms_together(place: Place, sizes: Gqa) -> bool:
    """Whether heads that are normed as one are on several ranks."""
    return sizes.qk_norm == "width" and place.ways > 1


def build_products(place: Place, sizes: Gqa) -> ir.Segment:
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
        **_biased(sizes),
    )


def build(place: Place, sizes: Gqa) -> ir.Segment:
    params, inputs, options = _first(place, sizes)
    turn = turning(sizes)
    part = GqaAttention(_projection(place, sizes), _softmax(place, sizes, turn.theta), _out_biased(place, sizes))
    return segment_of(
        "attention",
        part if place.part else through_stream(place, part),
        (*params, *_attending(place, sizes), *post_gain(place)),
        (*inputs, *place.places),
        (*(("y",) if place.part else ("entered", "y")), *qk_clip.outputs(place)),
        {"eps": place.model.norm_eps, **_sizes(place, sizes), "qk_norm": sizes.qk_norm is not None}
        | turn.constants
        | options
        | _options(place, sizes)
        | entrance(place)
        | exit_of(place),
    )


def build_project(place: Place, sizes: Gqa) -> ir.Segment:
    params, inputs, options = _first(place, sizes)
    turn = {name: value for name, value in turning(sizes, apart=True).constants.items() if name != "theta"}
    part = GqaProject(_projection(place, sizes, apart=True))
    return segment_of(
        "project",
        part if place.part else in_stream(place, part),
        params,
        (*inputs, *place.places),
        ("queries", "keys") if place.part else ("entered", "queries", "keys"),
        {"eps": place.model.norm_eps, **_sizes(place, sizes), "qk_norm": sizes.qk_norm is not None}
        | turn
        | options
        | ({"part": True} if place.part else {})
        | entrance(place),
    )


def build_attend(place: Place, sizes: Gqa) -> ir.Segment:
    heads = _heads(place, sizes)
    part = GqaAttend(_softmax(place, sizes, 0.0), sizes.output_gate, _out_biased(place, sizes))
    return segment_of(
        "attend",
        part if place.part else out_of_stream(place, part),
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
    heads, kv_heads = sizes.heads // place.ways, sizes.kv_heads // place.ways
    return Heads(place.spec.train.sequence, heads, kv_heads, sizes.head_dim)


def _projection(place: Place, sizes: Gqa, apart: bool = False) -> GqaProjection:
    """`apart`: queries are on another rank than keys, so attention does not rotate them."""
    heads, eps, turn = _heads(place, sizes), place.model.norm_eps, turning(sizes, apart)
    norms: HeadNorms | SharedNorms | None = HeadNorms(eps) if sizes.qk_norm else None
    if norms_together(place, sizes):
        norms = SharedNorms(eps, (place.ways * heads.queries, place.ways * heads.keys))
    rotate = Rotate(heads.sequence, turn.angles, apart)
    return GqaProjection(heads, sizes.bias is not None, sizes.output_gate, norms, rotate, turn.query_scale)


def _softmax(place: Place, sizes: Gqa, theta: float) -> GqaSoftmax:
    heads, peaks = _heads(place, sizes), qk_clip.is_clipped(place)
    if not _is_bounded(sizes):
        return GqaSoftmax(heads, theta, peaks)
    return BoundedSoftmax(heads, theta, peaks, sizes.window or 0, sizes.softcap or 0.0, sizes.sinks)


def _is_bounded(sizes: Gqa) -> bool:
    return sizes.window is not None or sizes.softcap is not None or sizes.sinks


def _out_biased(place: Place, sizes: Gqa) -> bool:
    """Whether the product behind attention has a bias; that of a sum over tensor ranks comes behind the sum."""
    return sizes.bias == "all" and not place.part


# ---------------------------------------------------------------- parameters


def _first(place: Place, sizes: Gqa) -> tuple[tuple[ir.Param, ...], tuple[ir.Input, ...], dict[str, Constant]]:
    """Parameters, inputs and constants of what comes in front of attention itself."""
    norms = _norms(place, sizes)
    gate: dict[str, Constant] = {"gate_at": sum(_heads(place, sizes).columns)} if sizes.output_gate else {}
    if norms_together(place, sizes):
        qkv = place.input("heads", place.T, sum(_columns(place, sizes)))
        squares = ir.Input("squares", (place.T, 2), place.wide_dtype)
        return norms, (qkv, squares), {"ways": place.ways, **gate}
    h = place.input("h", place.T, place.D)
    return (*pre_gain(place), *_products(place, sizes), *norms), (h,), _biased(sizes) | gate


def _columns(place: Place, sizes: Gqa) -> tuple[int, ...]:
    """Columns of queries, keys, values and, if there is one, of the gate."""
    heads = _heads(place, sizes)
    return (*heads.columns, *((heads.queries,) if sizes.output_gate else ()))


def _products(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of queries, keys and values, and of the gate."""
    columns = _columns(place, sizes)
    return place.rows(weights(place, "qkv", sum(columns), place.D, sizes.bias is not None), *columns)


def _norms(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The gains of queries and keys: of a head, or of all heads that a rank has."""
    if sizes.qk_norm is None:
        return ()
    if sizes.qk_norm == "head":
        return place.gain("q_norm", sizes.head_dim), place.gain("k_norm", sizes.head_dim)
    q, k = _heads(place, sizes).queries, _heads(place, sizes).keys
    return (*place.rows((place.gain("q_norm", q),), q), *place.rows((place.gain("k_norm", k),), k))


def _attending(place: Place, sizes: Gqa) -> tuple[ir.Param, ...]:
    """The parameters of attention and of what comes behind it."""
    heads = _heads(place, sizes)
    sinks = (place.vector("sinks", heads.heads, place.model.init_std),) if sizes.sinks else ()
    return (
        *place.rows(sinks, heads.heads),
        *place.columns(weights(place, "out", place.D, heads.queries, _out_biased(place, sizes))),
    )


# ---------------------------------------------------------------- constants that emitted segments print


def _sizes(place: Place, sizes: Gqa) -> dict[str, Constant]:
    return asdict(_heads(place, sizes))


def _biased(sizes: Gqa) -> dict[str, Constant]:
    return {"biased": True} if sizes.bias is not None else {}


def _options(place: Place, sizes: Gqa) -> dict[str, Constant]:
    """What a model has beside plain attention; none of them where it has nothing of it."""
    options = {
        "out_biased": _out_biased(place, sizes),
        "bounded": _is_bounded(sizes),
        "window": sizes.window or 0,
        "softcap": sizes.softcap or 0.0,
        "sinks": sizes.sinks,
        "part": place.part,
        **qk_clip.constants(place),
    }
    return {name: value for name, value in options.items() if value}
