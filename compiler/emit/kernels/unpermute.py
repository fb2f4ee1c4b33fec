"""Rows moved back to token order: when the Triton kernels apply and how they launch. Their text is unpermute.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES as WIDE
from compiler.emit.kernels.kernel import FUSION, KernelChoice, power_of_two
from compiler.emit.kernels.permute import BYTES, TILE
from compiler.ir import Buffer

STREAMS = {
    "_sum": ("ld.global.cg",),
    "_copy": ("ld.global.cg", "st.global.cs"),
    "_quantised_copy": ("ld.global.cg", "st.global.cs"),
}


def choose(x: Buffer, top_k: int, scaled: bool = False) -> KernelChoice | None:
    """Choose the kernels. A thread has 16 bytes twice; with more than 8 choices once, or sums spill (Triton 3.9)."""
    if x.dtype not in BYTES or scaled != (x.dtype == "float8_e4m3fn") or top_k > 16:
        return None
    columns = int(x.shape[1])
    block, elements = min(1024, power_of_two(columns)), 4096 if scaled else 2048 if top_k <= 8 else 1024
    scales = -(-columns // TILE) if scaled else 0
    launch = {"BLOCK_D": block, "num_warps": 4, **FUSION}
    return KernelChoice(
        name=f"unpermute_k{top_k}_d{columns}_{x.dtype}",
        template="unpermute",
        values=(
            ("scaled", scaled),
            ("quantised", False),
            ("K", top_k),
            ("D", columns),
            ("B", scales),
            ("ROWS", elements // block),
            ("INVERT", {"BLOCK_S": 256, "num_warps": 4, **FUSION}),
            ("COPY", {"BLOCK_B": power_of_two(max(1, scales)), **launch}),
            ("SUM", launch),
        ),
    )


def choose_quantised(x: Buffer, top_k: int) -> KernelChoice | None:
    """Choose the kernel of the fused quantising copy. A program has whole tiles."""
    if x.dtype not in WIDE or top_k > 16:
        return None
    columns = int(x.shape[1])
    block = min(1024, power_of_two(max(TILE, columns)))
    return KernelChoice(
        name=f"unpermute_quantise_k{top_k}_d{columns}_{x.dtype}",
        template="unpermute",
        values=(
            ("scaled", False),
            ("quantised", True),
            ("K", top_k),
            ("D", columns),
            ("B", -(-columns // TILE)),
            ("ROWS", 2048 // block),
            ("INVERT", {"BLOCK_S": 256, "num_warps": 4, **FUSION}),
            ("COPY", {"BLOCK_D": block, "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "permute_dgrad": lambda sms, drows, order, top_k: choose(drows, top_k),
    "permute_dgrad_add": lambda sms, drows, order, top_k, add, more: choose(drows, top_k),
    "unpermute": lambda sms, y, order, top_k: choose(y, top_k),
    "unpermute_add": lambda sms, h, shared, y, order, top_k: choose(y, top_k),
    "unpermute_dgrad": lambda sms, dy, order, top_k: choose(dy, top_k),
    "unpermute_dgrad_quantise": lambda sms, dy, order, top_k, pow2=False: choose_quantised(dy, top_k),
    "unpermute_fp8_dgrad": lambda sms, dy, scales, order, top_k: choose(dy, top_k, scaled=True),
}
