"""RMSNorm, of rows and of heads: when the Triton kernels apply and how they launch. Their text is rmsnorm.py.j2."""

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
    """Rows of `columns`, or of `heads` times as many, each whole in a program: 16,384 are 32 a thread of 16 warps."""
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
    """The launch of programs that own whole rows; narrow ones share one, so that a thread of 4 warps has 16 elements.

    4.3 TB/s at a latency of 1 µs want 32 KiB on their way to each of 132 SMs. Compiled for sm_90 with 512 to 16,384
    columns, as many programs as fit on one have 39 to 72 KiB forward and 84 to 144 backward, in 39 to 114 registers.
    Twice the warps have a third less; half of them hold 64 elements a thread, in up to 212 registers.
    """
    block = power_of_two(columns)
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "BLOCK_D": block, "num_warps": min(16, max(4, block * rows // 1024)), **FUSION}


def _weight_gradient(columns: int, num_sms: int) -> tuple[dict[str, Any], int]:
    """(the launch, into how many sums the rows are split). Blocks of columns of 4096 elements, about four an SM.

    With four warps some widths spill 8 or 16 bytes: 512 for sm_100 by Triton 3.9, 24 and 64 for sm_90 by 3.6.
    """
    block = min(1024, power_of_two(columns))
    launch = {"ROWS": 4096 // block, "BLOCK_D": block, "num_warps": 8, **FUSION}
    return launch, -(-4 * num_sms // -(-columns // block))


def _heads(row: Buffer, weight: Buffer, num_sms: int) -> KernelChoice | None:
    """The launch for rows [T, heads · columns] and a weight [columns], or a buffer of the shape of the weight."""
    width, columns = (int(each.shape[-1]) for each in (row, weight))
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
