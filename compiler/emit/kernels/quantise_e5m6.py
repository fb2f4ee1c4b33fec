"""Storing attention output in E5M6: when the Triton kernels apply and how they launch. Text: quantise_e5m6.py.j2.

Launches are those of the casts to E4M3 (quantise.py), which move tiles of the same sizes. By columns Triton 3.9 would
take 142 registers, and no second program would fit on an SM; with a limit of 128 it takes 117, without spills.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, KernelChoice
from compiler.emit.kernels.quantise import BY_COLUMNS, BY_ROWS
from compiler.ir import Buffer

STREAMS = {
    "_quantise": ("ld.global.L1::evict_first", "st.global.cs"),
    "_dequantise": ("ld.global.L1::evict_first", "st.global.cs"),
    "_requantise": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(columns: int) -> KernelChoice:
    """Choose the kernels for rows of `columns` elements."""
    return KernelChoice(
        name=f"quantise_e5m6_c{columns}",
        template="quantise_e5m6",
        values=(("C", columns), ("BY_ROWS", BY_ROWS), ("BY_COLUMNS", BY_COLUMNS | {"maxnreg": 128})),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "quantise_e5m6": lambda sms, x: _wide(x),
    "quantise_kept_e5m6": lambda sms, x, pow2=False: _wide(x),
    "dequantise_e5m6": lambda sms, high, low, s: choose(int(high.shape[1])),
    "dequantise_quantise_requantise_e5m6": lambda sms, high, low, s, pow2=False: choose(int(high.shape[1])),
}


def _wide(x: Buffer) -> KernelChoice | None:
    return choose(int(x.shape[1])) if x.dtype in BYTES else None
