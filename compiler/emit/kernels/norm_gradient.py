"""The gradient of an RMSNorm fused with the ops around it: when the kernels apply and how they launch.

Their text is norm_gradient.py.j2.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.emit.kernels.kernel import BYTES, FUSION, KernelChoice
from compiler.emit.kernels.rmsnorm import rows_of

STREAMS = {"_gradient": ("ld.global.L1::evict_first", "st.global.cs")}


def choose(columns: int, dtype: str, quantised: bool = False, top_k: int = 0) -> KernelChoice | None:
    """Choose the kernels for rows of `columns` elements, each in one program.

    If `top_k` is not 0, a row of dy is the sum of `top_k` expert rows. With more than 8192 columns, 16 warps spill up
    to 120 bytes: such wide layers do not fuse this.
    """
    if dtype not in BYTES or columns > 16384 or top_k > 16:
        return None
    kind = "_quantise" if quantised else f"_k{top_k}" if top_k else ""
    return KernelChoice(
        name=f"norm_gradient{kind}_d{columns}_{dtype}",
        template="norm_gradient",
        values=(
            ("quantised", quantised),
            ("permuted", top_k > 0),
            ("D", columns),
            ("K", top_k),
            ("INVERT", {"BLOCK_S": 256, "num_warps": 4, **FUSION}),
            ("LAUNCH", rows_of(max(columns, 128) if quantised else columns)),  # whole tiles
        ),
    )


OPS: dict[str, Callable[..., KernelChoice | None]] = {
    "rmsnorm_again_dgrad_add": lambda sms, dy, x, w, eps, add: choose(x.shape[1], x.dtype),
    "rmsnorm_again_quantise_dgrad_add": lambda sms, dy, x, w, eps, add, pow2=False: choose(x.shape[1], x.dtype, True),
    "sum_rmsnorm_dgrad_add": lambda sms, a, b, x, w, rstd, add: choose(x.shape[1], x.dtype),
    "sum_rmsnorm_again_dgrad_add": lambda sms, a, b, x, w, eps, add: choose(x.shape[1], x.dtype),
    "sum_rmsnorm_again_quantise_dgrad_add": (
        lambda sms, a, b, x, w, eps, add, pow2=False: choose(x.shape[1], x.dtype, True)
    ),
    "permuted_rmsnorm_dgrad_add": (
        lambda sms, drows, order, top_k, other, more, x, w, rstd, add: choose(x.shape[1], x.dtype, top_k=top_k)
    ),
    "permuted_rmsnorm_again_dgrad_add": (
        lambda sms, drows, order, top_k, other, more, x, w, eps, add: choose(x.shape[1], x.dtype, top_k=top_k)
    ),
}
