"""What a GPU does for ops whose rule does not tell: FLOPs, bytes, launches and temporary tensors.

`KERNEL_WORK` has ops whose kernels compute more than the FLOPs of the model, or keep tensors between launches: of
sparse attention they compute all scores, and mask those of keys that are not chosen; of a delta rule they keep what
passes between chunks, in BF16.

`TORCH_WORK` has ops that torch computes where there is no kernel, or where the run names torch. It computes them in
FP32, from block to block of a few queries or rows, with some ten kernels a block that each read and write whole tensors
of scores. The numbers of passes over them are counted, not derived: tests/runtime/ops/test_gpu_work.py runs the
ops on the meta device, adds up what every kernel reads and writes, and holds the formulas here to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from types import SimpleNamespace
from typing import NamedTuple

from compiler.ir import KernelWork, TorchWork
from compiler.model.ops.compress import COMPRESSED_ATTENTION
from compiler.model.ops.delta_rule import CHUNK
from compiler.model.ops.indexer import twice_seen

FP32, BF16 = 4, 2  # bytes
BLOCK_BYTES = 2**28  # of the scores of a block of queries on accelerators (runtime/ops/indexer.py)


# ---------------------------------------------------------------- kernels

SCORE_BYTES = 2**28  # of the scores that the choice of keys keeps (compiler/emit/kernels/select_keys.py)
PASSES = 6  # over a score of `select_keys`: written once, and read for each of four digits and to write the choice
KEYS_OF_BLOCK = 64  # for the gradient of keys and entries (compiler/emit/kernels/compressed_attention.py)
PART_ROWS = 2**14  # of their sums, which the programs of 132 SMs share
LOSS_PASSES = 8  # of `indexer_loss`: written twice, summed, made gradients, and read for those of queries and of keys


def _kernels_of_select_keys(n: SimpleNamespace) -> KernelWork:
    keys = max(1, n.sequence // n.rate)
    pairs = n.q[0] * keys // 2
    scores = FP32 * pairs
    return KernelWork(2 * pairs * (n.q[1] + n.heads), PASSES * scores, min(SCORE_BYTES, FP32 * n.q[0] * keys))


def _kernels_of_chosen_attention(n: SimpleNamespace) -> KernelWork:
    return KernelWork(_of_all_keys(n, keys=1, values=1), 0, _mark_bytes(n))


def _kernels_of_chosen_attention_dgrad(n: SimpleNamespace) -> KernelWork:
    of_heads = FP32 * n.heads * n.kv[0] * n.rope  # the gradient of the rotated key by each head, before their sum
    return KernelWork(_of_all_keys(n, keys=3, values=2), 2 * of_heads, 2 * _mark_bytes(n) + of_heads)


def _kernels_of_indexer_loss(n: SimpleNamespace) -> KernelWork:
    """Of attention q·k twice, for its denominator and for its weights; of the indexer q·k, and four products of the
    gradients of queries and keys, each with q·k again. All keys of the past count, chosen or not."""
    keys = max(1, n.sequence // n.rate)
    pairs = n.q[0] * keys // 2
    products = 2 * n.query[1] + 5 * n.q[1]
    scores = min(SCORE_BYTES, FP32 * n.q[0] * keys)
    marks = 0 if n.chosen is None else scores // FP32
    return KernelWork(2 * pairs * products, LOSS_PASSES * FP32 * pairs, scores + marks + 2 * FP32 * n.k[0] * n.k[1])


def _kernels_of_compressed_attention(n: SimpleNamespace) -> KernelWork:
    """Two groups of warps share a tile, and both compute its scores: three products where the op has two."""
    return KernelWork(3 * COMPRESSED_ATTENTION.flops(n) // 2, 0, 0)


def _kernels_of_compressed_attention_dgrad(n: SimpleNamespace) -> KernelWork:
    """Queries take three products. Keys take four, of which both groups of warps compute the two of scores. The window
    of a block of keys is longer than that of a key by the block. Gradients of chosen entries are written once for each
    token that chose them, and read once."""
    width, chosen = n.q[1] // n.heads, 0 if n.chosen is None else n.chosen[1]
    products = 9 * COMPRESSED_ATTENTION.flops(n) // 2
    of_blocks = 6 * 2 * n.q[0] * (KEYS_OF_BLOCK - 1) * n.q[1]
    added = BF16 * n.q[0] * min(chosen, n.sequence // n.rate) * width
    parts = FP32 * width * (n.kv[0] + PART_ROWS)
    return KernelWork(products + of_blocks, 2 * added + 4 * parts, min(SCORE_BYTES, added) + parts)


def _kernels_of_delta_rule(n: SimpleNamespace) -> KernelWork:
    """A row of a head multiplies a state three times, and a matrix of its chunk three times. It has two scores at each
    level. The inverse of a chunk takes two products at each of five levels, each as three products in BF16."""
    rows, K, V, W, levels = _rows_of_states(n)
    states = BF16 * K * V // CHUNK
    flops = 6 * K * V + 2 * CHUNK * ((2 * levels + 1) * K + 2 * V) + 60 * CHUNK**2
    passes = 3 * FP32 * W + BF16 * (6 * K + 4 * V) + 2 * (BF16 + FP32) * CHUNK + 2 * states
    kept = FP32 * W + BF16 * (3 * K + V) + (BF16 + FP32) * CHUNK + states
    return KernelWork(rows * flops, rows * passes, rows * kept)


def _kernels_of_delta_rule_dgrad(n: SimpleNamespace) -> KernelWork:
    """The forward runs again without its outputs. Then a row multiplies a state or its gradient nine times, a matrix of
    its chunk four times, and two gradients of scores at each level and side."""
    rows, K, V, W, levels = _rows_of_states(n)
    states = BF16 * K * V // CHUNK
    flops = 16 * K * V + 2 * CHUNK * ((6 * levels + 1) * K + 5 * V) + 60 * CHUNK**2
    passes = 7 * FP32 * W + (8 * BF16 + 4 * FP32) * K + 8 * BF16 * V + (8 * BF16 + 2 * FP32) * CHUNK + 4 * states
    kept = FP32 * W + (3 * BF16 + 2 * FP32) * K + 2 * BF16 * V + (3 * BF16 + FP32) * CHUNK + 2 * states
    return KernelWork(rows * flops, rows * passes, rows * kept)


def _rows_of_states(n: SimpleNamespace) -> tuple[int, int, int, int, int]:
    """(rows of all heads, width of a key, of a value, of a decay, levels). Scores of a chunk take one product if the
    columns of a key share their decay, else one for each level: its halves, quarters …"""
    (tokens, heads), K, W = n.beta, n.q[1] // n.key_heads, n.decay[1] // n.beta[1]
    return tokens * heads, K, n.v[1] // heads, W, CHUNK.bit_length() - 1 if W > 1 else 1


def _of_all_keys(n: SimpleNamespace, keys: int, values: int) -> int:
    """FLOPs of products of each query with all keys of its past: `keys` over the width of a key, and `values`."""
    seen = n.q[0] * twice_seen(n.sequence, None, 1) // n.sequence
    return seen * n.heads * (keys * (n.nope + n.rope) + values * n.value)


def _mark_bytes(n: SimpleNamespace) -> int:
    """A bit for each query and key of its sequence: whether it is chosen."""
    return n.q[0] * n.sequence // 8


KERNEL_WORK: Mapping[str, Callable[[SimpleNamespace], KernelWork]] = {
    "select_keys": _kernels_of_select_keys,
    "chosen_attention": _kernels_of_chosen_attention,
    "chosen_attention_dgrad": _kernels_of_chosen_attention_dgrad,
    "compressed_attention": _kernels_of_compressed_attention,
    "compressed_attention_dgrad": _kernels_of_compressed_attention_dgrad,
    "indexer_loss": _kernels_of_indexer_loss,
    "delta_rule": _kernels_of_delta_rule,
    "delta_rule_dgrad": _kernels_of_delta_rule_dgrad,
}

# ---------------------------------------------------------------- torch


class _ScoreBlocks(NamedTuple):
    """Blocks of queries, each with the scores of several heads for all keys of a sequence."""

    rows: int  # queries of a block
    number: int


def _blocks(sequences: int, queries: int, scores: int) -> _ScoreBlocks:
    """The blocks of `queries` queries of each of several sequences, with `scores` scores for each query."""
    rows = min(queries, max(1, BLOCK_BYTES // (FP32 * scores)))
    return _ScoreBlocks(rows, sequences * ceil(queries / rows))


def _queries(n: SimpleNamespace, keys: int, rows_of_keys: int) -> tuple[int, int]:
    """(sequences, queries of each)."""
    sequences = rows_of_keys // keys
    return sequences, n.q[0] // sequences


def _visible(n: SimpleNamespace, keys: int, blocks: _ScoreBlocks, queries: int) -> float:
    """How many keys a block of queries reads, on average: with positions all, else those before its last query."""
    return keys if getattr(n, "positions", None) else keys * (1 + blocks.rows / queries) / 2


def _select_keys(n: SimpleNamespace) -> TorchWork:
    keys = max(1, n.sequence // n.rate)
    sequences, queries = _queries(n, keys, n.k[0])
    blocks = _blocks(sequences, queries, n.heads * keys)
    hits = n.q[0] * n.heads * _visible(n, keys, blocks, queries)
    return TorchWork(
        flops=round(2 * hits * n.k[1]),
        bytes=round(4.6 * FP32 * hits),
        launches=25 * blocks.number,
        temporary_bytes=round(1.6 * BLOCK_BYTES) + FP32 * n.q[0] * n.top_k,
    )


def _chosen_attention(n: SimpleNamespace) -> TorchWork:
    return _masked_attention(n, keys=1, values=1, passes=9.5, rereads=1, launches=(12, 15), copies=1.5)


def _chosen_attention_dgrad(n: SimpleNamespace) -> TorchWork:
    return _masked_attention(n, keys=3, values=2, passes=17, rereads=3.6, launches=(26, 18), copies=4.2)


def _masked_attention(
    n: SimpleNamespace,
    keys: int,
    values: int,
    passes: float,
    rereads: float,
    launches: tuple[int, int],
    copies: float,
) -> TorchWork:
    """Attention that computes the scores of all keys: `keys` products over the width of a key and `values` over that of
    a value, `passes` over the scores, `rereads` of all keys and values by each block, `launches` in all and for each
    block, `copies` in FP32 of the inputs."""
    width = n.nope + n.rope + n.value
    sequences, queries = _queries(n, n.sequence, n.kv[0])
    blocks = _blocks(sequences, queries, n.heads * n.sequence)
    scores = n.q[0] * n.heads * n.sequence
    wide = FP32 * n.heads * (n.q[0] * (n.nope + n.rope) + n.kv[0] * width)
    return TorchWork(
        flops=2 * scores * (keys * (n.nope + n.rope) + values * n.value),
        bytes=round(FP32 * scores * (passes + rereads * width / blocks.rows)),
        launches=launches[0] + launches[1] * blocks.number,
        temporary_bytes=round(2.5 * BLOCK_BYTES + copies * wide),
    )


def _indexer_loss(n: SimpleNamespace) -> TorchWork:
    keys = max(1, n.sequence // n.rate)
    sequences, queries = _queries(n, keys, n.k[0])
    blocks = _blocks(sequences, queries, max(n.heads, n.index_heads) * keys)
    pairs = n.q[0] * _visible(n, keys, blocks, queries)
    attention, index, width = pairs * n.heads, pairs * n.index_heads, n.query[1] // n.heads
    by_key = n.heads * width + 5 * n.k[1]  # elements of a key and its gradient that each block reads or writes
    query, key = n.query[0] * n.query[1], n.k[0] * n.heads * width
    kv = 0 if n.kv is None else n.kv[0] * n.kv[1]
    return TorchWork(
        flops=round(2 * (attention * width + 4 * index * n.k[1])),
        bytes=round(FP32 * (11.4 * attention + 15 * index + pairs / blocks.rows * by_key)),
        launches=50 * blocks.number,
        temporary_bytes=round(2 * BLOCK_BYTES + FP32 * 1.5 * (query + n.q[0] * n.q[1]) + FP32 * (key + kv)),
    )


def _compressed_attention(n: SimpleNamespace) -> TorchWork:
    return _windows(n, products=2, passes=11.4, by_query=12.3, by_entry=3.3, launches=(26, 4), blocks=(0.4, 2.2))


def _compressed_attention_dgrad(n: SimpleNamespace) -> TorchWork:
    return _windows(n, products=5, passes=21, by_query=27.2, by_entry=12.1, launches=(37, 10), blocks=(0.6, 2.7))


def _windows(
    n: SimpleNamespace,
    products: int,
    passes: float,
    by_query: float,
    by_entry: float,
    launches: tuple[int, int],
    blocks: tuple[float, float],
) -> TorchWork:
    """Attention of blocks of positions to a window of keys and to entries: `passes` over the scores, `by_query` over
    the queries, `by_entry` over entries that are gathered for each query. `launches`: of a block, and for the entries
    of a sequence. `blocks`: of scores that exist at a time, without and with these entries."""
    width, sequences = n.q[1] // n.heads, n.q[0] // n.sequence
    entries, chosen = n.sequence // n.rate, 0 if n.chosen is None else n.chosen[1]
    scores = n.heads * (n.window + (chosen or entries))
    rows = max(1, min(BLOCK_BYTES // (FP32 * sequences * (scores + chosen * width)), max(16, n.window)))
    count = ceil(n.sequence / rows)
    slots = min(chosen, entries) if chosen else entries
    seen = slots * (1 - slots / (2 * entries))  # the first queries see fewer
    pairs = n.q[0] * n.heads * (min(n.sequence, n.window + rows - 1) + seen)
    queries, gathered = n.q[0] * n.q[1], n.q[0] * seen * width if chosen else 0
    return TorchWork(
        flops=round(2 * products * pairs * width),
        bytes=round(FP32 * (passes * pairs + by_query * queries + by_entry * gathered)),
        launches=(launches[0] + (launches[1] * sequences if chosen else 0)) * count,
        temporary_bytes=round(BF16 * queries + blocks[bool(chosen)] * BLOCK_BYTES),
    )


def _delta_rule(n: SimpleNamespace) -> TorchWork:
    by_column = n.decay[1] > n.beta[1]
    return _chunks(n, 4.5, 78 if by_column else 32, (141 if by_column else 58, 6), 6.3 if by_column else 4.6)


def _delta_rule_dgrad(n: SimpleNamespace) -> TorchWork:
    by_column = n.decay[1] > n.beta[1]
    return _chunks(n, 13.5, 208 if by_column else 99, (357 if by_column else 153, 8), 13.2 if by_column else 10.8)


def _chunks(n: SimpleNamespace, products: float, passes: float, launches: tuple[int, int], copies: float) -> TorchWork:
    """The delta rule in chunks: `products` over a state for each row, `passes` over queries, keys and values in FP32,
    `launches` in all and for each chunk."""
    (tokens, heads), width, value = n.beta, n.q[1] // n.key_heads, n.v[1] // n.beta[1]
    rows = FP32 * tokens * heads * (2 * width + value)
    return TorchWork(
        flops=round(2 * products * tokens * heads * width * value),
        bytes=round(passes * rows),
        launches=launches[0] + launches[1] * ceil(n.sequence / CHUNK),
        temporary_bytes=round(copies * rows),
    )


TORCH_WORK: Mapping[str, Callable[[SimpleNamespace], TorchWork]] = {
    "select_keys": _select_keys,
    "chosen_attention": _chosen_attention,
    "chosen_attention_dgrad": _chosen_attention_dgrad,
    "indexer_loss": _indexer_loss,
    "compressed_attention": _compressed_attention,
    "compressed_attention_dgrad": _compressed_attention_dgrad,
    "delta_rule": _delta_rule,
    "delta_rule_dgrad": _delta_rule_dgrad,
}
