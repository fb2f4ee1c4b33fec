"""SwiGLU, plain and with gate weights: when the Triton kernels apply and how they launch. Text: swiglu.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.kernels.kernel import BYTES, FUSION, Choice, power_of_two


def choose(inner: int, dtype: str, gated: bool) -> Choice | None:
    """Rows of 2·`inner` columns, whole rows in one program, which walks wide ones in blocks of 2048."""
    if dtype not in BYTES:
        return None
    block = min(2048, power_of_two(inner))
    return Choice(
        name=f"{'gated_' if gated else ''}swiglu_i{inner}_{dtype}",
        template="swiglu",
        values=(
            ("gated", gated),
            ("I", inner),
            ("BLOCK_I", block),
            ("ROWS", 2048 // block),
            ("LAUNCH", {"num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., Choice | None]] = {
    "swiglu": lambda sms, h: choose(h.shape[1] // 2, h.dtype, gated=False),
    "swiglu_dgrad": lambda sms, dy, h: choose(h.shape[1] // 2, h.dtype, gated=False),
    "gated_swiglu": lambda sms, h, gate: choose(h.shape[1] // 2, h.dtype, gated=True),
    "gated_swiglu_dgrad": lambda sms, dy, h, gate: choose(h.shape[1] // 2, h.dtype, gated=True),
}
