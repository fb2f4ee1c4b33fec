"""The attention of DeepSeek-V4, arXiv 2606.19348, §2.3: a window over one head of keys, and compressed entries.

T tokens of a micro-batch · D hidden · C columns of a head · E entries. Queries are low-rank, and each query head is
normed without a gain. One head is both key and value, so the output of attention is rotated back by the position of its
query: a value then depends only on its distance. The output projection first maps each group of heads (`group_out`),
then all groups together (`out`).

`pool` gives the values and, in the rows below, the gates of entries (`compress`). Entries are normed and rotated like
the first tokens of their windows. Queries attend to all entries before them (HCA), or to those that an indexer chooses
(CSA). The indexer reads the latent of queries and the input of attention, has its own entries as keys, and is trained
only by its own loss, as that of latent attention is (`compiler.model.layers.indexer`). The loss compares it with the
attention of all heads to the entries that it has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from compiler import ir
from compiler.model.layers import indexer
from compiler.model.layers.builder import Constant, Place, segment_of
from compiler.model.layers.residual import entrance, exit_of, post_gain, pre_gain, through_stream
from compiler.model.layers.rotation import Rotate, rotation_of_last
from dsl.schema import Compressed, Csa

NAMES = (
    *("norm", "q_down", "q_norm", "q_up", "kv", "kv_norm", "pool", "pool_bias", "pool_norm", "sinks"),
    *("group_out", "out", "post_norm"),
)
PARAMETERS = {name: f"attention.{name}" for name in NAMES} | indexer.PARAMETERS


@dataclass(frozen=True)
class Entries:
    """Compressed keys and values. The last columns of each entry are rotated."""

    columns: int  # of an entry
    rate: int  # tokens per entry
    overlap: bool  # whether an entry covers two windows of `rate` tokens
    rotate: Rotate
    eps: float

    def __call__(self, ops: Any, pool_T: Any, bias: Any, gain: Any) -> Any:
        """Values and gates -> entries, normed and rotated."""
        entries_EC = ops.rmsnorm(ops.compress(pool_T, bias, self.rotate.sequence, self.overlap), gain, self.eps)
        return self.rotate.rotate_with_stride(ops, entries_EC, self.rate, 1, self.rotate.first_of(self.columns))


@dataclass(frozen=True)
class WindowAttention:
    """Attention to a window of tokens only."""

    sequence: int
    heads: int
    window: int
    sinks: bool

    def __call__(self, ops: Any, p: Any, x_TD: Any, latent_TC: Any, q_T: Any, kv_TC: Any) -> tuple[Any, ...]:
        logits = p.sinks if self.sinks else None
        return (ops.bounded_attention(q_T, kv_TC, kv_TC, logits, self.sequence, self.heads, 1, 0.0, self.window, 0.0),)


@dataclass(frozen=True)
class EntriesAttention(WindowAttention):
    """Attention to a window of tokens, and to all entries before a token (HCA)."""

    entries: Entries

    def __call__(self, ops: Any, p: Any, x_TD: Any, latent_TC: Any, q_T: Any, kv_TC: Any) -> tuple[Any, ...]:
        entries_EC = self.entries(ops, ops.linear(x_TD, p.pool), p.pool_bias, p.pool_norm)
        return (self.attend(ops, p, (q_T, kv_TC, entries_EC), None),)

    def attend(self, ops: Any, p: Any, attending: tuple[Any, ...], chosen_TK: Any) -> Any:
        """Attention to the window and to all entries, or to the chosen ones."""
        sizes = self.sequence, self.heads, self.window, self.entries.rate
        return ops.compressed_attention(*attending, chosen_TK, p.sinks if self.sinks else None, *sizes)


@dataclass(frozen=True)
class ChosenEntriesAttention(EntriesAttention):
    """Attention to a window of tokens, and to the entries that an indexer chooses (CSA). Returns its loss last."""

    index: indexer.Index
    index_entries: Entries

    def __call__(self, ops: Any, p: Any, x_TD: Any, latent_TC: Any, q_T: Any, kv_TC: Any) -> tuple[Any, ...]:
        entries_EC = self.entries(ops, ops.linear(x_TD, p.pool), p.pool_bias, p.pool_norm)
        scoring, rate = self._scoring(ops, p, x_TD, latent_TC), self.entries.rate
        chosen_TK = None
        if self.index.top_k:
            top_k = min(self.index.top_k, self.sequence // rate)
            chosen_TK = ops.select_keys(*scoring, self.sequence, self.index.heads, top_k, rate)
        o_T = self.attend(ops, p, (q_T, kv_TC, entries_EC), chosen_TK)
        sizes = self.sequence, self.index.heads, self.heads, 0, rate
        return o_T, ops.indexer_loss(*scoring, q_T, None, entries_EC, chosen_TK, *sizes)

    def _scoring(self, ops: Any, p: Any, x_TD: Any, latent_TC: Any) -> tuple[Any, Any, Any]:
        """Queries of the indexer's heads, its entries, and the weights of the heads."""
        heads, width, _ = self.index
        q_T = ops.linear_detached(latent_TC, p.index_q)
        q_T = self.entries.rotate(ops, q_T, (), heads, self.entries.rotate.first_of(width))
        pool = ops.linear_detached(x_TD, p.index_pool)
        entries_EC = self.index_entries(ops, pool, p.index_pool_bias, p.index_pool_norm)
        return q_T, entries_EC, ops.scale(ops.linear_detached(x_TD, p.index_weights), 1 / sqrt(heads * width))


@dataclass(frozen=True)
class CompressedAttention:
    """out(group_out(attend(q, kv, entries))), and the loss of the indexer if there is one."""

    eps: float
    heads: int
    head_dim: int
    rotate: Rotate
    attend: WindowAttention

    def __call__(self, ops: Any, p: Any, x_TD: Any) -> tuple[Any, ...]:
        first, rotate = self.rotate.first_of(self.head_dim), self.rotate
        latent_TC = ops.rmsnorm(ops.linear(x_TD, p.q_down), p.q_norm, self.eps)
        q_T = ops.unweighted_rmsnorm(ops.linear(latent_TC, p.q_up), self.heads, self.eps)
        q_T = rotate(ops, q_T, (), self.heads, first)
        kv_TC = rotate(ops, ops.rmsnorm(ops.linear(x_TD, p.kv), p.kv_norm, self.eps), (), 1, first)
        o_T, *loss = self.attend(ops, p, x_TD, latent_TC, q_T, kv_TC)
        o_T = rotate.rotate_with_stride(ops, o_T, -1, self.heads, first)
        return ops.linear(ops.block_linear(o_T, p.group_out), p.out), *loss


def build(place: Place, sizes: Compressed) -> ir.Segment:
    """The segment of compressed attention (HCA and CSA): h (T·D) -> the residual stream, the value to add to it, and
    with CSA the loss of the indexer."""
    sequence, eps, angles = place.spec.train.sequence, place.model.norm_eps, rotation_of_last(sizes)
    rotate = Rotate(sequence, angles)
    attention = CompressedAttention(eps, sizes.heads, sizes.head_dim, rotate, _attending(place, sizes, rotate))
    return segment_of(
        "attention",
        through_stream(place, attention),
        (*pre_gain(place), *_parameters(place, sizes), *post_gain(place)),
        (place.input("h", place.T, place.D),),
        ("entered", "y", *indexer.losses(place)),
        {"eps": eps, "sequence": sequence, "heads": sizes.heads, "head_dim": sizes.head_dim, "window": sizes.window}
        | ({"rotation": angles} if angles else {})
        | _options(sizes)
        | indexer.constants(place)
        | entrance(place)
        | exit_of(place),
    )


def _attending(place: Place, sizes: Compressed, rotate: Rotate) -> WindowAttention:
    """The attention step: to a window, and to entries if the layer has them."""
    window = rotate.sequence, sizes.heads, sizes.window, sizes.sinks
    if sizes.compress is None:
        return WindowAttention(*window)
    index, rate, eps = indexer.index_of(place), sizes.compress.rate, place.model.norm_eps
    entries = Entries(sizes.head_dim, rate, index is not None, rotate, eps)
    if index is None:
        return EntriesAttention(*window, entries)
    return ChosenEntriesAttention(*window, entries, index, Entries(index.width, rate, True, rotate, eps))


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
        *place.fused_params((place.weight("group_out", sum(blocks), heads * C // sizes.groups),), *blocks),
        place.weight("out", D, sum(blocks)),
        *_index_weights(place, sizes),
    )


def _index_weights(place: Place, sizes: Compressed) -> tuple[ir.Param, ...]:
    """The parameters of the indexer, if there is one."""
    if not isinstance(sizes.compress, Csa):
        return ()
    index = sizes.compress.indexer
    return (
        place.weight("index_q", index.heads * index.head_dim, sizes.query_rank),
        *_pools(place, "index_pool", index.head_dim, 2, sizes.compress.rate),
        place.weight("index_weights", index.heads, place.D),
    )


def _pools(place: Place, name: str, columns: int, series: int, rate: int) -> tuple[ir.Param, ...]:
    """The parameters of entries of `columns` columns, with one or two `series` of values and gates."""
    width = series * columns
    return (
        *place.fused_params((place.weight(name, 2 * width, place.D),), width, width),
        place.positions(f"{name}_bias", rate, width),
        place.gain(f"{name}_norm", columns),
    )


def _options(sizes: Compressed) -> dict[str, Constant]:
    """The constants of sinks and entries, if the layer has them."""
    return {**({"sinks": True} if sizes.sinks else {}), **({"rate": sizes.compress.rate} if sizes.compress else {})}
