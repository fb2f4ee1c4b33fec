"""The logits of residual streams, scaled part by part: when the Triton kernels apply and how they launch.

Their text is scale_parts.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

MOST_LOGITS = 128


def choose(logits: Buffer, scale: Buffer) -> KernelChoice | None:
    """Choose the kernels for one part, or for those of pre, post and comb."""
    M, S = int(logits.shape[1]), int(scale.shape[0])
    if logits.dtype != "float32" or scale.dtype not in BYTES or M > MOST_LOGITS:
        return None
    block = power_of_two(M)
    return KernelChoice(
        name=f"scale_parts_s{S}_m{M}_{scale.dtype}",
        template="scale_parts",
        values=(
            ("S", S),
            ("M", M),
            ("n", M if S == 1 else isqrt(M + 1) - 1),
            ("LAUNCH", {"ROWS": 2048 // block, "BLOCK_M": block, "num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "scale_parts": lambda sms, logits, scale: choose(logits, scale),
    "scale_parts_dgrad": lambda sms, dy, scale: choose(dy, scale),
    "scale_parts_wgrad_": lambda sms, acc, dy, logits: choose(logits, acc) if dy.dtype == "float32" else None,
}
