"""A linear layer fused with the cross entropy of its outputs: when the Triton kernels apply and how they launch.

Their text is linear_cross_entropy.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, LEGS, KernelChoice
from compiler.ir import Buffer

CHUNK = 8192  # columns of the vocabulary whose gradients are in memory at a time

STREAMS = {"_weight_gradient": ("ld.global.L1::evict_first", "st.global.cs")}


def choose(vocab: int, hidden: int, dtype: str, num_sms: int, part: bool = False) -> KernelChoice | None:
    """Choose the kernels for weights [vocab, hidden], of the whole vocabulary or a shard (`part`).

    Rows are copied in blocks, so they must be aligned to 16 bytes.
    """
    if dtype not in BYTES or hidden * BYTES[dtype] % 16:
        return None
    logits = _tile(dtype, "T", "V", "D", vocab) | {"FLATTEN": False}
    return KernelChoice(
        name=f"linear_cross_entropy_{'part_' if part else ''}v{vocab}_d{hidden}_{dtype}",
        template="linear_cross_entropy",
        values=(
            ("part", part),
            ("V", vocab),
            ("D", hidden),
            ("CHUNK", CHUNK),
            ("PROGRAMS", num_sms),
            ("LEGS", LEGS),
            ("SWIZZLE", 16),
            ("FORWARD", logits),
            ("LOGITS", logits),
            ("DGRAD", _tile(dtype, "T", "D", "V", hidden)),
            ("WGRAD", _tile(dtype, "V", "D", "T", hidden)),
            ("ROWS", {"num_warps": 4, **FUSION}),
        ),
    )


def _tile(dtype: str, rows: str, columns: str, inner: str, extent: int) -> dict[str, Any]:
    """The launch of a product whose result has `extent` columns.

    BF16: tiles of 128 × 256 with 8 warps, 128 accumulators per thread, and four stages of 48 KiB. In a flattened loop
    copies for a tile overlap with the epilogue of the previous one, which takes up to 33 KiB more. The products that
    read gradients then use at most 225 registers on sm_90 without spills, and do not spill on sm_100 either. Those that
    compute logits would spill 40 to 96 bytes, so their loops are not flattened. A mask that differs within 128 columns
    needs more registers than are left.
    """
    if dtype == "float32":
        tile = {f"BLOCK_{rows}": 64, f"BLOCK_{columns}": _extent(extent, 128), f"BLOCK_{inner}": 16}
        return tile | {"FLATTEN": False, "num_warps": 8, "num_stages": 3, **FUSION}
    width = _extent(extent, 128 if extent % 128 else 256)
    tile = {f"BLOCK_{rows}": 128, f"BLOCK_{columns}": width, f"BLOCK_{inner}": 64}
    return tile | {"FLATTEN": True, "num_warps": 8, "num_stages": 4, **FUSION}


def _extent(size: int, largest: int) -> int:
    """The largest tile extent, halved while that saves more than an eighth of the computed columns."""
    extent = largest
    while extent > 32 and -(-size // (extent // 2)) * (extent // 2) * 8 < -(-size // extent) * extent * 7:
        extent //= 2
    return extent


def _choose(h: Buffer, w: Buffer, num_sms: int, part: bool = False) -> KernelChoice | None:
    vocab, hidden = (int(extent) for extent in w.shape)
    return choose(vocab, hidden, w.dtype, num_sms, part) if h.dtype == w.dtype else None


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "linear_cross_entropy": lambda sms, h, w, targets: _choose(h, w, sms),
    "linear_cross_entropy_dgrad": lambda sms, dloss, h, w, targets, lse: _choose(h, w, sms),
    "linear_cross_entropy_wgrad_": lambda sms, acc, dloss, h, w, targets, lse: _choose(h, w, sms),
    "linear_cross_entropy_part": lambda sms, h, w, targets: _choose(h, w, sms, True),
    "linear_cross_entropy_part_dgrad": lambda sms, dlse, dpicked, h, w, targets, lse: _choose(h, w, sms, True),
    "linear_cross_entropy_part_wgrad_": lambda sms, acc, dlse, dpicked, h, w, targets, lse: _choose(h, w, sms, True),
}
