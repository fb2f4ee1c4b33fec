"""RMSNorm of rows and of heads: when the Triton kernels apply and how they launch. Their text is rmsnorm.py.j2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice, power_of_two
from compiler.ir import Buffer

STREAMS = {
    "_forward": ("ld.global.L1::evict_first", "st.global.cs"),
    "_input_gradient": ("ld.global.L1::evict_first", "st.global.cs"),
    "_partial_weight_gradient": ("ld.global.L1::evict_first",),
}


def choose(columns: int, dtype: str, num_sms: int, heads: int | None = None) -> KernelChoice | None:
    """Choose the kernels for norms over `columns`, with one norm or `heads` norms per row, each in one program. With
    16,384 columns, each thread of 16 warps has 32."""
    if dtype not in BYTES or columns > 16384:
        return None
    wgrad, splits = _weight_gradient(columns, num_sms)
    return KernelChoice(
        name=f"rmsnorm_d{columns}_{dtype}" if heads is None else f"head_rmsnorm_h{heads}_d{columns}_{dtype}",
        template="rmsnorm",
        values=(
            ("heads", heads is not None),
            ("D", columns),
            ("HEADS", heads or 1),
            ("FORWARD", rows_of(columns)),
            ("DGRAD", rows_of(columns)),
            ("WGRAD", wgrad),
            ("SPLITS", splits),
            ("TOTAL", {"BLOCK_P": 128, "BLOCK_D": 32, "num_warps": 4, **FUSION}),
        ),
    )


def rows_of(columns: int) -> dict[str, Any]:
    """The launch of programs that own whole rows. Narrow rows share a program, so that a thread of 4 warps has 16
    elements.

    4.3 TB/s at a latency of 1 µs need 32 KiB in flight to each of 132 SMs. Compiled for sm_90 with 512 to 16,384
    columns, the programs that fit on an SM have 39 to 72 KiB in flight forward and 84 to 144 backward, with 39 to 114
    registers. Twice the warps have a third less; half the warps hold 64 elements per thread, in up to 212 registers.
    """
    block = power_of_two(columns)
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "BLOCK_D": block, "num_warps": min(16, max(4, block * rows // 1024)), **FUSION}


def _weight_gradient(columns: int, num_sms: int) -> tuple[dict[str, Any], int]:
    """(the launch, the number of partial sums over rows). Blocks have 4096 elements; about four blocks per SM.

    With four warps some widths spill 8 or 16 bytes: 512 for sm_100 with Triton 3.9, 24 and 64 for sm_90 with 3.6.
    """
    block = min(1024, power_of_two(columns))
    launch = {"ROWS": 4096 // block, "BLOCK_D": block, "num_warps": 8, **FUSION}
    return launch, -(-4 * num_sms // -(-columns // block))


def _heads(row: Buffer, weight: Buffer, num_sms: int) -> KernelChoice | None:
    """The choice for rows [T, heads · columns] and a weight [columns], or a buffer of the weight's shape."""
    width, columns = (int(buffer.shape[-1]) for buffer in (row, weight))
    return choose(columns, row.dtype, num_sms, width // columns)


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "rmsnorm": lambda sms, x, w, eps: choose(x.shape[1], x.dtype, sms),
    "rmsnorm_dgrad": lambda sms, dy, x, w, rstd: choose(x.shape[1], x.dtype, sms),
    "rmsnorm_wgrad_": lambda sms, acc, dy, x, rstd: choose(x.shape[1], x.dtype, sms),
    "add_rmsnorm": lambda sms, h, x, w, eps: choose(x.shape[1], x.dtype, sms),
    "rmsnorm_dgrad_add": lambda sms, dy, x, w, rstd, add: choose(x.shape[1], x.dtype, sms),
    "head_rmsnorm": lambda sms, x, w, eps: _heads(x, w, sms),
    "head_rmsnorm_dgrad": lambda sms, dy, x, w, rstd: _heads(x, w, sms),
    "head_rmsnorm_wgrad_": lambda sms, acc, dy, x, rstd: _heads(x, acc, sms),
}
