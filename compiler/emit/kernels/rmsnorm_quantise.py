"""RMSNorm with its result quantised: when the kernels apply and how they launch. Text: rmsnorm_quantise.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, KernelChoice
from compiler.emit.kernels.rmsnorm import rows_of

STREAMS = {"_forward": ("ld.global.L1::evict_first", "st.global.cs")}


def choose(columns: int, dtype: str) -> KernelChoice | None:
    """Choose the kernels for rows of `columns` elements, each in one program, as in `rmsnorm`."""
    if dtype not in BYTES or columns > 16384:
        return None
    return KernelChoice(
        name=f"rmsnorm_quantise_d{columns}_{dtype}",
        template="rmsnorm_quantise",
        values=(("D", columns), ("LAUNCH", rows_of(max(columns, 128)))),  # whole tiles
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "rmsnorm_quantise": lambda sms, x, w, eps, pow2=False: choose(x.shape[1], x.dtype),
    "rmsnorm_quantise_wide": lambda sms, x, w, eps, pow2=False: choose(x.shape[1], x.dtype),
    "add_rmsnorm_quantise": lambda sms, h, x, w, eps, pow2=False: choose(x.shape[1], x.dtype),
    "add_rmsnorm_quantise_wide": lambda sms, h, x, w, eps, pow2=False: choose(x.shape[1], x.dtype),
}
