"""Quantising casts: when the Triton kernels apply and how they launch. Their text is quantise.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice
from compiler.ir import Buffer

E4M3 = "float8_e4m3fn"
# Whole tiles, with as few elements as 128 rows allow. Compiled for sm_90: by rows 32 registers, 16 programs per SM with
# 8 KiB each in flight; by columns or both 91 to 111 registers, two programs with 32 KiB each. With sixteen warps only
# one program fits on an SM. One approximate division per scale: two exact ones were a third of all instructions (31 per
# element both ways, now 22; a copy at full speed leaves time for 34).
BY_ROWS = {"ROWS": 16, "COLUMNS": 256, "num_warps": 4, **FUSION}
BY_COLUMNS = {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, **FUSION}
BLOCKS = {"num_warps": 8, **FUSION}
STREAMS = {
    "_quantise": ("ld.global.L1::evict_first", "st.global.cs"),
    "_quantise_blocks": ("ld.global.L1::evict_first", "st.global.cs"),
}


def choose(columns: int, dtype: str) -> KernelChoice | None:
    """Choose the kernels for rows of `columns` elements."""
    if dtype not in (*BYTES, E4M3):
        return None
    return KernelChoice(
        name=f"quantise_c{columns}_{dtype}",
        template="quantise",
        values=(("C", columns), ("BY_ROWS", BY_ROWS), ("BY_COLUMNS", BY_COLUMNS), ("BLOCKS", BLOCKS)),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "quantise": lambda sms, x, pow2=False: _wide(x),
    "quantise_columns": lambda sms, x, pow2=False: _wide(x),
    "quantise_both": lambda sms, x, pow2=False: _wide(x),
    "quantise_requantise": lambda sms, x, pow2=False: _wide(x),
    "quantise_blocks": lambda sms, w, pow2=False: _wide(w),
    "requantise": lambda sms, q, s, pow2=False: choose(q.shape[1], q.dtype) if q.dtype == E4M3 else None,
}


def _wide(x: Buffer) -> KernelChoice | None:
    return choose(int(x.shape[-1]), x.dtype) if x.dtype in BYTES else None
