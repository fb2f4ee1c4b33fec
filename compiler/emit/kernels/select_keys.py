"""The choice of keys by an indexer: when the Triton kernels apply and how they launch. Text: select_keys.py.j2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer
from compiler.model.ops.kernel_shapes import takes_choices

SCRATCH_BYTES = 2**28  # of the scores of as many queries as fit, which the choice reads five times
MAX_BLOCK = 2048  # keys that the choice reads at a time; two counts of these fit 32 bits


def choose(
    sms: int, q: Buffer, k: Buffer, weights: Buffer, sequence: int, heads: int, top_k: int, rate: int, *spans: Any
) -> KernelChoice | None:
    """Scores of tiles of M queries and N keys, then one program for each query, with BLOCK keys at a time.

    At 128 columns in BF16 two programs share an SM: one sums products while the other multiplies. For each head a tile
    reads its queries from L2, 16 KiB for 2.1 MFLOP.
    """
    columns, keys = int(k.shape[1]), sequence // rate
    block = max(16, power_of_two(columns))
    wide = "float32" in (q.dtype, k.dtype)
    if weights.dtype not in BYTES or q.dtype != k.dtype or not takes_choices(columns, keys, q.dtype):
        return None
    tile = (32, 32, 4, 2) if wide else (64, 128, 4, 2)
    scores = dict(zip(("M", "N", "num_warps", "num_stages"), tile, strict=True))
    select = {"BLOCK": min(MAX_BLOCK, max(128, power_of_two(keys))), "num_warps": 8 if keys > 1024 else 4}
    tiles = max(1, SCRATCH_BYTES // (4 * scores["M"] * _padded(keys)))
    return KernelChoice(
        name=f"select_keys_l{keys}_r{rate}_h{heads}_c{columns}_k{top_k}_{q.dtype}_{weights.dtype}",
        template="select_keys",
        values=(
            ("L", keys),
            ("H", heads),
            ("C", columns),
            ("K", top_k),
            ("RATE", rate),
            ("WIDTH", _padded(keys)),
            ("TILES", tiles),
            ("SCORES", {"BLOCK_C": block, **scores, **FUSION}),
            ("SELECT", {**select, **FUSION}),
        ),
    )


def _padded(keys: int) -> int:
    """The columns of a row of scores, which begins at a multiple of 64 bytes."""
    return -(-keys // 16) * 16


OPS: dict[str, Callable[..., KernelChoice | None]] = {"select_keys": choose}
