"""SwiGLU with its results quantised: when the Triton kernels apply and how they launch. Text: swiglu_quantise.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import FUSION, KernelChoice
from compiler.emit.kernels.quantise import E4M3
from compiler.ir import Buffer

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_again": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("st.global.cs",),  # two programs read the same
}
# By columns 128 × 128 elements with 8 warps: 112 to 128 registers, two programs per SM, no spills (sm_90). Both halves
# of the gradient in one program need 245 registers, or spill with 16 warps; so does a loop that loads ahead. The
# kernels are bound by instructions: 46 per element of a half, where a copy at full speed leaves time for about 34.


def choose(inner: int, dtype: str) -> KernelChoice | None:
    """Choose the kernels for rows of 2·`inner` columns.

    `inner` must be whole tiles, or the second half would begin inside a tile.
    """
    if dtype not in ("bfloat16", E4M3) or inner % 128:
        return None
    fp8 = dtype == E4M3
    return KernelChoice(
        name=f"swiglu_{'fp8_' if fp8 else ''}quantise_i{inner}",
        template="swiglu_quantise",
        values=(
            ("fp8", fp8),
            ("I", inner),
            ("FORWARD", {"ROWS": 8, "COLUMNS": 256 if inner >= 256 else 128, "num_warps": 4, **FUSION}),
            ("TILES", {"num_warps": 8, **FUSION}),
            ("GATES", {"ROWS": 128, "num_warps": 4, **FUSION}),
        ),
    )


def _choose(h: Buffer) -> KernelChoice | None:
    return choose(int(h.shape[1]) // 2, h.dtype)


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "swiglu_quantise": lambda sms, h, pow2=False: _choose(h),
    "gated_swiglu_quantise": lambda sms, h, gate, pow2=False: _choose(h),
    "swiglu_quantise_kept": lambda sms, h, pow2=False: _choose(h),
    "gated_swiglu_quantise_kept": lambda sms, h, gate, pow2=False: _choose(h),
    "swiglu_fp8_quantise_requantise": lambda sms, h, s, pow2=False: _choose(h),
    "gated_swiglu_fp8_quantise_requantise": lambda sms, h, s, gate, pow2=False: _choose(h),
    "swiglu_dgrad_quantise_both": lambda sms, dy, h, pow2=False: _choose(h),
    "gated_swiglu_dgrad_quantise_both": lambda sms, dy, h, gate, pow2=False: _choose(h),
    "swiglu_fp8_dgrad_quantise_both": lambda sms, dy, h, s, pow2=False: _choose(h),
    "gated_swiglu_fp8_dgrad_quantise_both": lambda sms, dy, h, s, gate, pow2=False: _choose(h),
}
