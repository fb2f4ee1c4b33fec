"""The delta rule by flash-linear-attention (the package `fla`): when it applies. Text: fla.py.j2.

It takes BF16 and whole sequences. Documents would need their number on the host. With one decay for each column of a
key, every head of queries and keys must have its own head of values.
"""

from __future__ import annotations

from typing import Any

from compiler.emit.kernels.kernel import Family, KernelChoice
from compiler.ir import Buffer

MAX_WIDTH = 256  # columns of a key


def choose(q: Buffer, v: Buffer, beta: Buffer, decay: Buffer, *sizes: Any) -> KernelChoice | None:
    """Choose the text for q [T, G·K], v [T, H·V], beta [T, H] and decay [T, H] or [T, H·K]."""
    S, G, *starts = sizes
    H, K = int(beta.shape[1]), int(q.shape[1]) // G
    V, by_column = int(v.shape[1]) // H, decay.shape[1] != beta.shape[1]
    if q.dtype != "bfloat16" or v.dtype != "bfloat16" or K > MAX_WIDTH or (by_column and G != H):
        return None
    if starts and starts[0] is not None:
        return None
    return KernelChoice(
        name=f"fla_{'kda' if by_column else 'delta_rule'}_s{S}_g{G}_h{H}_k{K}_v{V}",
        template="fla",
        is_library=True,
        values=(("by_column", by_column), ("S", S), ("G", G), ("H", H), ("K", K), ("V", V)),
    )


OPS: Family = {
    "delta_rule": lambda sms, q, k, v, beta, decay, *sizes: choose(q, v, beta, decay, *sizes),
    "delta_rule_dgrad": lambda sms, do, q, k, v, beta, decay, *sizes: choose(q, v, beta, decay, *sizes),
}
