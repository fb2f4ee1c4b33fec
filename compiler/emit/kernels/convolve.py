"""Short causal convolutions of columns with a SiLU: when the Triton kernels apply and how they launch.

Their text is convolve.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {"_forward": ("st.global.cs",), "_input_gradient": ("st.global.cs",)}
# A thread of the gradient holds this many rows of x and of its gradient, and the four that it reads next.
MOST_TAPS = 4


def choose(x: Buffer, w: Buffer, suffix: str = "") -> KernelChoice | None:
    """Choose the kernels for rows of N columns and J taps, of which a thread has 8 columns."""
    columns, taps = (int(extent) for extent in w.shape)
    if x.dtype not in BYTES or w.dtype not in BYTES or not 2 <= taps <= MOST_TAPS:
        return None
    block = min(1024, max(32, power_of_two(columns)))
    return KernelChoice(
        name=f"convolve_n{columns}_j{taps}_{x.dtype}{'' if w.dtype == x.dtype else f'_{w.dtype}'}{suffix}",
        template="convolve",
        values=(
            ("N", columns),
            ("J", taps),
            ("RUN", 32),
            ("WGRAD_RUN", 128),
            ("LAUNCH", {"BLOCK_N": block, "num_warps": max(1, block // 256), **FUSION}),
            # With 8 columns in FP32, a thread of the weight gradient spills 16 bytes on sm_100.
            ("WGRAD", {"BLOCK_N": block // 2, "num_warps": max(1, block // 256), **FUSION}),
            ("TOTAL", {"BLOCK_P": 32, "BLOCK": 64, "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "convolve": lambda sms, x, w, sequence, starts=None: choose(x, w, "_documents" if starts else ""),
    "convolve_dgrad": lambda sms, dy, x, w, before: choose(x, w) if dy.dtype == x.dtype else None,
    "convolve_wgrad_": lambda sms, acc, dy, x, w, before: (
        choose(x, w) if dy.dtype == x.dtype and acc.dtype == "float32" else None
    ),
}
