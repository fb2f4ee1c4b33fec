"""The indexer of attention, which chooses the keys of each query. DeepSeek-V3.2, arXiv 2512.02556, §2.1.

Here is that of latent attention, whose keys are of tokens; that of compressed attention chooses entries
(`compiler.model.layers.compressed`).

It reads the normed latent of queries and what attention reads, and gives neither a gradient: it is trained by its own
loss alone, as it is by nothing else. Its heads are those of every tensor rank. Each of these compares it with the heads
of its own, and the mean of these losses has the gradient of the loss of all heads: that is linear in their mean.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

from compiler import ir
from compiler.model.layers.builder import Constant, Place
from compiler.model.layers.rotation import Rotate
from dsl.schema import Compressed, Indexer, Mla

EPS = 1e-6  # of the LayerNorm of its keys, as published
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
    """Heads of the indexer, their width, and how many keys they choose: 0, all of them."""

    heads: int
    width: int
    top_k: int


def keys(ops: Any, p: Any, x_T: Any, places_T: tuple[Any, ...], rotate: Rotate) -> Any:
    """One key of each row for all heads, behind a LayerNorm, rotated."""
    normed_TC = ops.rmsnorm(ops.center(ops.linear_detached(x_T, p.index_k)), p.index_norm, EPS)
    return rotate(ops, ops.add_bias(normed_TC, p.index_bias), places_T, 1)


def queries(
    ops: Any, p: Any, x_T: Any, latent_T: Any, places_T: tuple[Any, ...], index: Index, rotate: Rotate
) -> tuple[Any, Any]:
    """The queries of all heads of each row, rotated, and what their products are weighted by."""
    q_T = rotate(ops, ops.linear_detached(latent_T, p.index_q), places_T, index.heads)
    return q_T, ops.scale(ops.linear_detached(x_T, p.index_weights), 1 / sqrt(index.heads * index.width))


def attended(
    ops: Any,
    index: Index,
    scoring: tuple[Any, ...],
    attending: tuple[Any, Any, Any],
    places_T: tuple[Any, ...],
    sequence: int,
    sizes: tuple[int, int, int, int],
) -> tuple[Any, tuple[Any, ...]]:
    """What attention gives over the keys that are chosen, or over all, and the loss of the indexer, summed over rows.

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


# ---------------------------------------------------------------- where it is, and what of it


def indexer_of(place: Place) -> Indexer | None:
    """The indexer of attention at a place, if it has one. The rules ask for a latent of queries, which it reads."""
    sizes = place.attention or place.model.attention
    return sizes.indexer if isinstance(sizes, Mla | Compressed) and sizes.query_rank else None


def losses(place: Place) -> tuple[str, ...]:
    """The output of attention that is the loss of its indexer."""
    return ("index_loss",) if indexer_of(place) else ()


def scoring(place: Place) -> tuple[ir.Input, ...]:
    """What attention of a context rank is given of the indexer, beside keys."""
    indexer = indexer_of(place)
    if indexer is None:
        return ()
    queries = place.input("index_queries", place.T, indexer.heads * indexer.head_dim)
    return queries, place.input("index_gates", place.T, indexer.heads)


def index_of(place: Place) -> Index | None:
    """The sizes of the indexer at a place; it chooses all keys while it alone is trained."""
    indexer = indexer_of(place)
    if indexer is None:
        return None
    dense = place.spec.train.only == "indexer"
    return Index(indexer.heads, indexer.head_dim, 0 if dense else indexer.top_k)


def constants(place: Place) -> dict[str, Constant]:
    """What a segment says of the indexer: nothing where there is none."""
    index = index_of(place)
    return {} if index is None else {"index": tuple(index)}


def weights(place: Place, rank: int | None) -> tuple[ir.Param, ...]:
    """Its parameters, whole on each tensor rank. `rank`: of the latent of queries."""
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


def alone(segment: ir.Segment) -> ir.Segment:
    """A segment of which the indexer alone is trained. The rest keeps its weights, and the state of the optimizer."""
    still = (
        param if param.name in PARAMETERS or param.role != "parameter" else replace(param, grad=False, role="still")
        for param in segment.params
    )
    return replace(segment, params=tuple(still))
