"""The embedding: when the Triton kernels apply and how they launch. Their text is embedding.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two

STREAMS = {"_gather": ("ld.global.cg",), "_add_rows": ("ld.global.cg",)}


def choose(columns: int, dtype: str, accumulated: str = "float32") -> KernelChoice | None:
    """Choose the kernels for a table with rows of `columns` elements. Gradients are accumulated in FP32 only."""
    if dtype not in BYTES or accumulated != "float32":
        return None
    block = min(1024, power_of_two(columns))
    return KernelChoice(
        name=f"embedding_d{columns}_{dtype}",
        template="embedding",
        values=(
            ("D", columns),
            ("SORT", {"SORTED": 32, "OTHERS": 64, "num_warps": 8, **FUSION}),
            ("MOVE", {"ROWS": 2048 // block, "BLOCK_D": block, "num_warps": 4, **FUSION}),
            ("ADD", {"ROWS": max(4, 1024 // block), "BLOCK_D": block, "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "embedding": lambda sms, tokens, w: choose(int(w.shape[1]), w.dtype),
    "embedding_wgrad_": lambda sms, acc, dh, tokens: choose(int(dh.shape[1]), dh.dtype, acc.dtype),
}
