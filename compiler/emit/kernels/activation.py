"""Activations other than plain SwiGLU, gated or not: when the Triton kernels apply and how they launch.

Their text is activation.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, identifier_part, power_of_two
from compiler.ir import Buffer

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
}
GATED, PLAIN = ("geglu", "geglu_tanh"), ("gelu", "gelu_tanh", "relu2")


def choose(op: str, h: Buffer, *constants: float) -> KernelChoice | None:
    """Choose the kernels for rows of two halves, gate and up, or of one half without a gate.

    A thread has 16 elements of each half.
    """
    gated = op not in PLAIN
    inner = int(h.shape[1]) // (2 if gated else 1)
    if h.dtype not in BYTES:
        return None
    block = min(2048, power_of_two(inner))
    limit, alpha, shift = constants or (None, None, None)
    return KernelChoice(
        name="_".join([op, f"i{inner}", *map(identifier_part, constants), h.dtype]),
        template="activation",
        values=(
            ("op", op),
            ("gated", gated),
            ("LIMIT", limit),
            ("ALPHA", alpha),
            ("SHIFT", shift),
            ("I", inner),
            ("WIDTH", int(h.shape[1])),
            ("BLOCK_I", block),
            ("ROWS", 2048 // block),
            ("LAUNCH", {"num_warps": 4, **FUSION}),
        ),
    )


def _rows(op: str) -> dict[str, Callable[..., KernelChoice | None]]:
    """The rows for an op and its gradient."""
    return {
        op: lambda sms, h, *constants: choose(op, h, *constants),
        f"{op}_dgrad": lambda sms, dy, h, *constants: choose(op, h, *constants),
    }


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    name: row for op in (*GATED, *PLAIN, "clamped_swiglu") for name, row in _rows(op).items()
}
