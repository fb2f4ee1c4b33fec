"""AdamW: when the Triton kernel applies and how it launches. Its text is adamw.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice
from compiler.ir import Buffer

FILE = "adamw"  # one text for all dtypes; the runtime finds it by this name

STREAMS = {"_update": ("ld.global.L1::evict_first", "st.global.cs")}


def _choose(
    master: Buffer, gradients: Buffer, moment1: Buffer, moment2: Buffer, rounded: Buffer | None
) -> KernelChoice | None:
    """Choose the kernel for FP32 master weights, gradients and moments in FP32 or BF16, and separate BF16 weights."""
    if master.dtype != "float32" or any(part.dtype not in BYTES for part in (gradients, moment1, moment2)):
        return None
    if rounded is not None and rounded.dtype != "bfloat16":
        return None
    return KernelChoice(
        name=FILE,
        template="adamw",
        values=(
            ("BLOCK", 2048),
            ("LOAD", "evict_first"),
            ("STORE", ".cs"),
            ("LAUNCH", {"num_warps": 8, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "adamw": lambda sms, master, gradients, moment1, moment2, rounded, *numbers: _choose(
        master, gradients, moment1, moment2, rounded
    ),
}
