"""SwiGLU, plain and with gate weights: when the Triton kernels apply and how they launch. Text: swiglu.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.emit.kernels.quantise import E4M3

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(inner: int, dtype: str) -> KernelChoice | None:
    """Choose the kernels for rows of 2·`inner` columns. A thread has 16 elements of each half.

    A sector has eight scales of E4M3 rows.
    """
    fp8 = dtype == E4M3
    if dtype not in BYTES and (not fp8 or inner % 128):
        return None
    block = min(256 if fp8 else 2048, power_of_two(inner))
    return KernelChoice(
        name=f"swiglu_{'fp8_' if fp8 else ''}i{inner}{'' if fp8 else f'_{dtype}'}",
        template="swiglu",
        values=(
            ("fp8", fp8),
            ("I", inner),
            ("BLOCK_I", block),
            ("ROWS", 2048 // block),
            ("LAUNCH", {"num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "swiglu": lambda sms, h: choose(h.shape[1] // 2, h.dtype),
    "swiglu_dgrad": lambda sms, dy, h: choose(h.shape[1] // 2, h.dtype),
    "gated_swiglu": lambda sms, h, gate: choose(h.shape[1] // 2, h.dtype),
    "gated_swiglu_dgrad": lambda sms, dy, h, gate: choose(h.shape[1] // 2, h.dtype),
    "swiglu_fp8": lambda sms, h, s: choose(h.shape[1] // 2, h.dtype),
    "swiglu_fp8_dgrad": lambda sms, dy, h, s: choose(h.shape[1] // 2, h.dtype),
    "gated_swiglu_fp8": lambda sms, h, s, gate: choose(h.shape[1] // 2, h.dtype),
    "gated_swiglu_fp8_dgrad": lambda sms, dy, h, s, gate: choose(h.shape[1] // 2, h.dtype),
}
