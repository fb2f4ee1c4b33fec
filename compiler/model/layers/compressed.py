"""The attention of DeepSeek-V4, arXiv 2606.19348, §2.3: a window over one head of keys, and compressed entries.

T tokens of a micro-batch · D hidden · C columns of a head · E entries. Queries are of low rank, and each head is normed
without a gain. One head is both key and value, so what attention returns is rotated back by the position of its query:
a value then depends on its distance alone. Groups of heads are projected apart, and then together.

`pool` gives the values and, below them, the gates of entries (`compress`), which are normed, and rotated as the first
tokens of their windows are. Queries attend to all entries before them (HCA), or to those that an indexer chooses (CSA).
It reads the latent of queries and what attention reads, has entries of its own as keys, and is trained by its own loss,
as that of latent attention is (`compiler.model.layers.indexer`): the attention that it is compared with is that of all
heads to the entries it has chosen.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from compiler import ir
from compiler.model.layers import indexer
from compiler.model.layers.builder import Constant, Place, segment
from compiler.model.layers.residual import entering, entrance, exit_of, leaving, post_gain, pre_gain
from compiler.model.layers.rotation import Rotation, rotated, rotation_of_last
from dsl.schema import Compressed, Csa

NAMES = (
    *("norm", "q_down", "q_norm", "q_up", "kv", "kv_norm", "pool", "pool_bias", "pool_norm", "sinks"),
    *("group_out", "out", "post_norm"),
)
PARAMETERS = {name: f"attention.{name}" for name in NAMES} | indexer.PARAMETERS


def compressed(
    ops: Any,
    p: Any,
    h_TD: Any,
    *,
    eps: float,
    sequence: int,
    heads: int,
    head_dim: int,
    window: int,
    rotation: Rotation = (),
    sinks: bool = False,
    rate: int = 0,
    index: Any = (),
    pre: bool = True,
    post: bool = False,
    factor: float = 1.0,
) -> tuple[Any, ...]:
    """h, handed through, and out(group_out(attend(q, kv, entries))); with `rate` 0 there are no entries. With an
    `index` there is the loss of the indexer besides, and entries are of two windows."""
    x_TD = entering(ops, p, h_TD, eps, pre)
    first = head_dim - int(rotation[0]) if rotation else 0
    latent_TC = ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, eps)
    q_T = ops.unweighted_rmsnorm(ops.linear(latent_TC, p.q_up), heads, eps)
    q_T = rotated(ops, q_T, (), sequence, heads, first, rotation)
    kv_TC = rotated(ops, ops.rmsnorm(ops.linear(x_TD, p.kv), p.kv_norm, eps), (), sequence, 1, first, rotation)
    logits, loss = p.sinks if sinks else None, tuple[Any, ...]()
    if rate:
        pool, how = ops.linear(x_TD, p.pool), (sequence, rate, rotation, eps)
        entries_EC = _entries(ops, pool, p.pool_bias, p.pool_norm, bool(index), *how)
        scoring = _scoring(ops, p, x_TD, latent_TC, index, *how) if index else ()
        chosen_TK = _chosen(ops, scoring, index, sequence, rate) if index and index[2] else None
        o_T = ops.compressed_attention(q_T, kv_TC, entries_EC, chosen_TK, logits, sequence, heads, window, rate)
        if index:
            sizes = sequence, index[0], heads, 0, rate
            loss = (ops.indexer_loss(*scoring, q_T, None, entries_EC, chosen_TK, *sizes),)
    else:
        o_T = ops.bounded_attention(q_T, kv_TC, kv_TC, logits, sequence, heads, 1, 0.0, window, 0.0)
    o_T = rotated(ops, o_T, (), sequence, heads, first, rotation, stride=-1)
    y_TD = ops.linear(ops.block_linear(o_T, p.group_out), p.out)
    return h_TD, leaving(ops, p, y_TD, eps, post, factor), *loss


def _entries(
    ops: Any,
    pool_T: Any,
    bias: Any,
    gain: Any,
    overlap: bool,
    sequence: int,
    rate: int,
    rotation: Rotation,
    eps: float,
) -> Any:
    """Entries of values and gates, normed, with their last columns rotated."""
    entries_EC = ops.rmsnorm(ops.compress(pool_T, bias, sequence, overlap), gain, eps)
    first = entries_EC.shape[1] - int(rotation[0]) if rotation else 0
    return rotated(ops, entries_EC, (), sequence, 1, first, rotation, stride=rate)


def _scoring(
    ops: Any,
    p: Any,
    x_TD: Any,
    latent_TC: Any,
    index: indexer.Index,
    sequence: int,
    rate: int,
    rotation: Rotation,
    eps: float,
) -> tuple[Any, Any, Any]:
    """Queries of the indexer's heads, its entries, and what their products are weighted by."""
    heads, width, _ = index
    q_T = ops.linear_detached(latent_TC, p.index_q)
    q_T = rotated(ops, q_T, (), sequence, heads, width - int(rotation[0]) if rotation else 0, rotation)
    pool = ops.linear_detached(x_TD, p.index_pool)
    entries = _entries(ops, pool, p.index_pool_bias, p.index_pool_norm, True, sequence, rate, rotation, eps)
    return q_T, entries, ops.scale(ops.linear_detached(x_TD, p.index_weights), 1 / sqrt(heads * width))


def _chosen(ops: Any, scoring: tuple[Any, ...], index: indexer.Index, sequence: int, rate: int) -> Any:
    """The entries that each query attends to."""
    heads, _, top_k = index
    return ops.select_keys(*scoring, sequence, heads, min(top_k, sequence // rate), rate)


def build(place: Place, sizes: Compressed) -> ir.Segment:
    how = rotation_of_last(sizes)
    return segment(
        "attention",
        compressed,
        (*pre_gain(place), *_parameters(place, sizes), *post_gain(place)),
        (place.input("h", place.T, place.D),),
        ("entered", "y", *indexer.losses(place)),
        eps=place.model.norm_eps,
        sequence=place.spec.train.sequence,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        window=sizes.window,
        **({"rotation": how} if how else {}),
        **_options(sizes),
        **indexer.constants(place),
        **entrance(place),
        **exit_of(place),
    )


def _parameters(place: Place, sizes: Compressed) -> tuple[ir.Param, ...]:
    D, C, heads = place.D, sizes.head_dim, sizes.heads
    blocks, series = (sizes.out_rank,) * sizes.groups, 2 if isinstance(sizes.compress, Csa) else 1
    return (
        place.weight("q_down", sizes.query_rank, D),
        place.gain("q_norm", sizes.query_rank),
        place.weight("q_up", heads * C, sizes.query_rank),
        place.weight("kv", C, D),
        place.gain("kv_norm", C),
        *(_pools(place, "pool", C, series, sizes.compress.rate) if sizes.compress else ()),
        *((place.vector("sinks", heads, place.model.init_std),) if sizes.sinks else ()),
        *place.fused((place.weight("group_out", sum(blocks), heads * C // sizes.groups),), *blocks),
        place.weight("out", D, sum(blocks)),
        *_index_weights(place, sizes),
    )


def _index_weights(place: Place, sizes: Compressed) -> tuple[ir.Param, ...]:
    """The parameters of the indexer, if there is one."""
    if not isinstance(sizes.compress, Csa):
        return ()
    of = sizes.compress.indexer
    return (
        place.weight("index_q", of.heads * of.head_dim, sizes.query_rank),
        *_pools(place, "index_pool", of.head_dim, 2, sizes.compress.rate),
        place.weight("index_weights", of.heads, place.D),
    )


def _pools(place: Place, name: str, columns: int, series: int, rate: int) -> tuple[ir.Param, ...]:
    """The parameters of entries of so many columns, of one or two `series` of values and gates."""
    width = series * columns
    return (
        *place.fused((place.weight(name, 2 * width, place.D),), width, width),
        place.positions(f"{name}_bias", rate, width),
        place.gain(f"{name}_norm", columns),
    )


def _options(sizes: Compressed) -> dict[str, Constant]:
    """The constants of what a layer has beside the window."""
    return {**({"sinks": True} if sizes.sinks else {}), **({"rate": sizes.compress.rate} if sizes.compress else {})}
