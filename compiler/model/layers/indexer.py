"""The indexer of attention, which chooses the keys of each query. DeepSeek-V3.2, arXiv 2512.02556, §2.1.

This is the indexer of latent attention, which chooses tokens. That of compressed attention chooses entries
(`compiler.model.layers.compressed`).

The indexer reads the normed latent of queries and the input of attention, and passes no gradient to either. Only
its own loss trains it, and this loss trains nothing else. It is replicated on all tensor ranks. Each rank compares it
with the attention of its own heads. The mean of these losses has the gradient of the loss of all heads, because that is
linear in the mean of the heads.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from compiler import ir
from compiler.model.layers.builder import Constant, Place
from compiler.model.layers.rotation import Rotate
from dsl.schema import Compressed, Indexer, Mla

EPS = 1e-6  # of the LayerNorm on the indexer's keys, as published
PARAMETERS = {
    "index_q": "attention.indexer.q",
    "index_k": "attention.indexer.k",
    "index_norm": "attention.indexer.k_norm",
    "index_bias": "attention.indexer.k_bias",
    "index_weights": "attention.indexer.weights",
    "index_pool": "attention.indexer.pool",
    "index_pool_bias": "attention.indexer.pool_bias",
    "index_pool_norm": "attention.indexer.pool_norm",
}


class Index(NamedTuple):
    """Sizes of the indexer."""

    heads: int
    width: int  # of a head
    top_k: int  # number of keys to choose; 0: all keys


def keys(ops: Any, p: Any, x_T: Any, places_T: tuple[Any, ...], rotate: Rotate) -> Any:
    """One key per row, shared by all heads, after a LayerNorm and rotation."""
    normed_TC = ops.rmsnorm(ops.center(ops.linear_detached(x_T, p.index_k)), p.index_norm, EPS)
    return rotate(ops, ops.add_bias(normed_TC, p.index_bias), places_T, 1)


def queries(
    ops: Any, p: Any, x_T: Any, latent_T: Any, places_T: tuple[Any, ...], index: Index, rotate: Rotate
) -> tuple[Any, Any]:
    """The rotated queries of all heads of each row, and the weights of the heads."""
    q_T = rotate(ops, ops.linear_detached(latent_T, p.index_q), places_T, index.heads)
    return q_T, ops.scale(ops.linear_detached(x_T, p.index_weights), 1 / sqrt(index.heads * index.width))


def attend(
    ops: Any,
    index: Index,
    scoring: tuple[Any, ...],
    attending: tuple[Any, Any, Any],
    places_T: tuple[Any, ...],
    sequence: int,
    sizes: tuple[int, int, int, int],
) -> tuple[Any, tuple[Any, ...]]:
    """Return attention over the chosen keys, or over all, and the loss of the indexer, summed over rows.

    `scoring`: queries, keys and weights of the indexer; `attending`: queries, keys and values, and rope keys; `sizes`:
    heads, nope, rope, value."""
    (index_heads, _, top_k), (heads, nope, *_) = index, sizes
    if top_k:
        chosen_TK = ops.select_keys(*scoring, sequence, index_heads, min(top_k, sequence), 1, *places_T)
        o_T = ops.chosen_attention(*attending, chosen_TK, sequence, *sizes)
    else:
        chosen_TK = None
        o_T = ops.mla_attention(*attending, sequence, *sizes, 0.0, *places_T)
    loss = ops.indexer_loss(*scoring, *attending, chosen_TK, sequence, index_heads, heads, nope, 1, *places_T)
    return o_T, (loss,)


# ---------------------------------------------------------------- at a place in the model


def indexer_of(place: Place) -> Indexer | None:
    """The indexer of attention at a place, if it has one. It needs a latent of queries, as the rules of the spec
    check."""
    sizes = place.attention or place.model.attention
    return sizes.indexer if isinstance(sizes, Mla | Compressed) and sizes.query_rank else None


def losses(place: Place) -> tuple[str, ...]:
    """The output of attention for the loss of its indexer, if it has one."""
    return ("index_loss",) if indexer_of(place) else ()


def scoring(place: Place) -> tuple[ir.Input, ...]:
    """The indexer's inputs of `attend` under context parallelism, besides keys: its queries and weights."""
    indexer = indexer_of(place)
    if indexer is None:
        return ()
    queries = place.input("index_queries", place.T, indexer.heads * indexer.head_dim)
    return queries, place.input("index_gates", place.T, indexer.heads)


def index_of(place: Place) -> Index | None:
    """The sizes of the indexer at a place, if there is one. It chooses all keys while only the indexer is trained."""
    indexer = indexer_of(place)
    if indexer is None:
        return None
    dense = place.spec.train.only == "indexer"
    return Index(indexer.heads, indexer.head_dim, 0 if dense else indexer.top_k)


def constants(place: Place) -> dict[str, Constant]:
    """The constant for the sizes of the indexer, if there is one."""
    index = index_of(place)
    return {} if index is None else {"index": tuple(index)}


def weights(place: Place, rank: int | None) -> tuple[ir.Param, ...]:
    """The parameters of the indexer, replicated on all tensor ranks. `rank`: of the latent of queries."""
    indexer = indexer_of(place)
    if indexer is None or not rank:
        return ()
    return (
        place.weight("index_q", indexer.heads * indexer.head_dim, rank),
        place.weight("index_k", indexer.head_dim, place.D),
        place.gain("index_norm", indexer.head_dim),
        place.vector("index_bias", indexer.head_dim),
        place.weight("index_weights", indexer.heads, place.D),
    )


def freeze_all_but_indexer(segment: ir.Segment) -> ir.Segment:
    """The segment with only the indexer trained. Other parameters keep their values and optimizer state."""
    params = (
        param if param.name in PARAMETERS or param.role != "parameter" else replace(param, grad=False, role="still")
        for param in segment.params
    )
    return replace(segment, params=tuple(params))
