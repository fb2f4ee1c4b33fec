"""Grouped products by torch.nn.functional.grouped_mm: when it applies. Text: grouped_mm.py.j2.

It takes BF16 whose rows are aligned to 16 bytes. Weight gradients stay with the kernel of the build, because grouped_mm
rounds its result to BF16 before it could be added in FP32.
"""

from __future__ import annotations

from compiler.emit.kernels.kernel import Family, KernelChoice
from compiler.ir import Buffer

ALIGNMENT = 8  # elements of BF16 in 16 bytes


def choose(weights: Buffer, rows: Buffer) -> KernelChoice | None:
    """Choose the text for weights [E, N, K] and rows that they are multiplied with."""
    E, N, K = (int(extent) for extent in weights.shape)
    if weights.dtype != "bfloat16" or rows.dtype != "bfloat16" or N % ALIGNMENT or K % ALIGNMENT:
        return None
    return KernelChoice(
        name=f"grouped_mm_e{E}_n{N}_k{K}",
        template="grouped_mm",
        is_library=True,
        values=(("E", E), ("N", N), ("K", K)),
    )


OPS: Family = {
    "grouped_linear": lambda sms, x, w, offsets: choose(w, x),
    "grouped_linear_dgrad": lambda sms, dy, w, offsets: choose(w, dy),
}
