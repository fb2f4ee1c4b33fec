"""The loss of an indexer and its gradients: when the Triton kernels apply and how they launch. Text:
indexer_loss.py.j2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer
from compiler.model.ops.kernel_shapes import takes_indexer_loss

SCRATCH_BYTES = 2**28  # of the scores of as many queries as fit, which become their gradients
CHUNK = 128  # columns of a head of attention that are multiplied at a time
STREAMS = {"_scale": ("ld.global.L1::evict_first", "st.global.cs")}


def choose(sms: int, arguments: Sequence[Any]) -> KernelChoice | None:
    """Tiles of M queries and N keys. Of the gradient of keys, PARTS programs share a block of keys, each with some of
    the heads, so that every SM has about two programs."""
    q, k, weights, query, kv, k_rope, chosen, sequence, index_heads, heads, nope, rate, *_ = arguments
    columns, rope, keys = int(k.shape[1]), int(k_rope.shape[1]), sequence // rate
    ours, theirs = {q.dtype, k.dtype}, {query.dtype, k_rope.dtype, *([kv.dtype] if kv else [])}
    if not theirs | {weights.dtype} <= {*BYTES} or len(ours) > 1 or len(theirs) > 1:
        return None
    if not takes_indexer_loss(columns, nope, rope, keys, q.dtype):
        return None
    wide = "float32" in ours | theirs
    M = 32 if wide else 64
    top_k = int(chosen.shape[1]) if chosen else 0
    width = -(-keys // 16) * 16
    tiles = max(1, SCRATCH_BYTES // (4 * M * width))
    gradient_keys = 32 if wide else 64
    parts = min(index_heads, power_of_two(max(1, 2 * sms * gradient_keys // keys)))
    kv_width = int(kv.shape[1]) // heads if kv else 0
    blocks = {"BLOCK_NOPE": max(16, power_of_two(nope or 1)), "BLOCK_ROPE": min(CHUNK, max(16, power_of_two(rope)))}
    ours_block = {"BLOCK_C": max(16, power_of_two(columns))}
    four = {"M": M, "num_warps": 4, "num_stages": 2, **FUSION}
    # With N 64, two or three programs of 4 warps share an SM: one finds powers while another multiplies. With N 128
    # _differ spills 16 bytes. In FP32 it spills 232 with 4 warps.
    attention = differences = {"N": 64, "num_warps": 4}
    if nope + rope > 256:  # two stages take 260 KiB on 3.6 for sm_100
        attention = differences = {"N": 64, "num_warps": 8, "num_stages": 1}
    if wide:
        attention, differences = {"N": 32, "num_warps": 4}, {"N": 32, "num_warps": 8}
    return KernelChoice(
        name=(
            f"indexer_loss_l{keys}_r{rate}_h{index_heads}_c{columns}_a{heads}_n{nope}_{kv_width}_r{rope}_k{top_k}"
            f"_{q.dtype}_{weights.dtype}_{query.dtype}"
        ),
        template="indexer_loss",
        values=(
            ("L", keys),
            ("H", index_heads),
            ("C", columns),
            ("K", top_k),
            ("A", heads),
            ("NOPE", nope),
            ("KV", kv_width),
            ("ROPE", rope),
            ("RATE", rate),
            ("SCALE", (nope + rope) ** -0.5 * math.log2(math.e)),
            ("WIDTH", width),
            ("TILES", tiles),
            ("PARTS", parts),
            ("M", M),
            ("still", not wide),  # offsets of a loop stay in it
            ("MARKS", {"BLOCK": min(2048, power_of_two(max(1, top_k))), "num_warps": 4, **FUSION}),
            ("SCORES", {**four, "N": 32 if wide else 128, **ours_block}),
            ("ROWS", {"BLOCK": min(2048, max(128, power_of_two(keys))), "num_warps": 4, **FUSION}),
            ("ATTENTION", {**four, **attention, **blocks}),
            ("DIFFERENCES", {**four, **differences, **blocks}),
            ("QUERIES", {**four, "N": 32 if wide else 64, **ours_block}),
            ("KEYS", {**four, "N": gradient_keys, **ours_block}),
        ),
    )


def choose_dgrad(dloss: Buffer, q: Buffer, k: Buffer, weights: Buffer) -> KernelChoice | None:
    """16 elements a thread."""
    if not {dloss.dtype, q.dtype, k.dtype, weights.dtype} <= {*BYTES}:
        return None
    return KernelChoice(
        name="indexer_loss_dgrad",
        template="indexer_loss_dgrad",
        values=(("SCALE", {"BLOCK": 2048, "num_warps": 4, **FUSION}),),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "indexer_loss": lambda sms, *arguments: choose(sms, arguments),
    "indexer_loss_dgrad": lambda sms, dloss, q, k, weights: choose_dgrad(dloss, q, k, weights),
}
