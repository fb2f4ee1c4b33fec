"""RMSNorm: when the Triton kernels apply and how they launch. Their text is rmsnorm.py.j2."""

from __future__ import annotations

from collections.abc import Callable

from compiler.kernels.kernel import BYTES, FUSION, Choice, power_of_two


def choose(columns: int, dtype: str, num_sms: int) -> Choice | None:
    """Rows of `columns`, each whole in one program: 16,384 columns are 32 registers a thread of 16 warps."""
    if dtype not in BYTES or columns > 16384:
        return None
    block = power_of_two(columns)
    rows = max(1, 2048 // block)  # narrow rows share a program, so that each thread of 4 warps has 16 elements
    return Choice(
        name=f"rmsnorm_d{columns}_{dtype}",
        template="rmsnorm",
        values=(
            ("D", columns),
            ("BLOCK_D", block),
            ("ROWS", rows),
            ("PROGRAMS", num_sms),
            ("BLOCK_P", power_of_two(num_sms)),
            ("LAUNCH", {"num_warps": min(16, max(4, block * rows // 1024)), **FUSION}),
            ("TOTAL", {"num_warps": 4, **FUSION}),
        ),
    )


OPS: dict[str, Callable[..., Choice | None]] = {
    "rmsnorm": lambda sms, x, w, eps: choose(x.shape[1], x.dtype, sms),
    "rmsnorm_dgrad": lambda sms, dy, x, w, rstd: choose(x.shape[1], x.dtype, sms),
    "rmsnorm_wgrad_": lambda sms, acc, dy, x, rstd: choose(x.shape[1], x.dtype, sms),
}
