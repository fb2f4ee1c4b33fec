"""Products of normed residual streams with a few rows: when the Triton kernels apply and how they launch.

Their text is hyper_products.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {"_input_gradient": ("st.global.cs",)}
# The most rows of fn: 7 streams have 63. With more, the gradients spill: 336 bytes in FP32, and 24 in BF16 on sm_100.
MOST_ROWS = 64


def choose(h: Buffer, fn: Buffer) -> KernelChoice | None:
    """Choose the kernels for rows as wide as `fn`, [M, N], or its gradient."""
    rows, columns = (int(extent) for extent in fn.shape)
    if h.dtype not in BYTES or rows > MOST_ROWS:
        return None
    return KernelChoice(
        name=f"hyper_products_m{rows}_n{columns}_{h.dtype}",
        template="hyper_products",
        values=(
            ("M", rows),
            ("N", columns),
            ("SPAN", 2048),
            ("DGRAD_SPAN", 1024),
            ("FORWARD", _launch(rows, h.dtype, 128, 3)),
            ("DGRAD", _launch(rows, h.dtype, 64, 3)),
            ("WGRAD", _launch(rows, h.dtype, 64, 4)),
            ("TOTAL", {"BLOCK_T": 32, "BLOCK_M": power_of_two(rows), "num_warps": 4, **FUSION}),
        ),
    )


def _launch(rows: int, dtype: str, columns: int, stages: int) -> dict[str, Any]:
    """Tiles of 64 tokens, which tensor cores multiply by 16 rows of fn or more. FP32 runs without tensor cores, with
    smaller tiles."""
    block = max(16, power_of_two(rows))
    if dtype == "float32":
        return {"BLOCK_T": 32, "BLOCK_M": block, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2, **FUSION}
    return {"BLOCK_T": 64, "BLOCK_M": block, "BLOCK_N": columns, "num_warps": 4, "num_stages": stages, **FUSION}


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "hyper_products": lambda sms, h, fn, eps: choose(h, fn) if h.dtype == fn.dtype else None,
    "hyper_products_dgrad": (
        lambda sms, dproducts, h, fn, products, rstd: choose(h, fn) if h.dtype == fn.dtype else None
    ),
    "hyper_products_wgrad_": lambda sms, acc, dproducts, h, rstd: choose(h, acc) if acc.dtype == "float32" else None,
}
