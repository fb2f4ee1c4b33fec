"""Triton kernels as emitted source: one row for each op that has one, its reference being the op in `runtime/ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.ir import Buffer
from compiler.kernels import grouped_linear, rmsnorm, swiglu
from compiler.kernels.kernel import Choice, KernelFile, render

__all__ = ["KERNELS", "KernelFile", "emit_kernel"]


def _grouped(experts: Buffer, rows: Buffer, other: Buffer, offsets: Buffer, num_sms: int) -> Choice | None:
    """`experts` is what has shape [E, N, K]; `rows` and `other` meet in one product, so their dtypes must agree."""
    E, N, K = (int(extent) for extent in experts.shape)
    if rows.dtype != other.dtype:
        return None
    return grouped_linear.choose(E, N, K, int(offsets.shape[0]), rows.dtype, num_sms)


# op → its choice, from the number of SMs and the op's own arguments. Ops that share a file make the same choice.
KERNELS: dict[str, Callable[..., Choice | None]] = {
    "rmsnorm": lambda sms, x, w, eps: rmsnorm.choose(x.shape[1], x.dtype, sms),
    "rmsnorm_dgrad": lambda sms, dy, x, w, rstd: rmsnorm.choose(x.shape[1], x.dtype, sms),
    "rmsnorm_wgrad_": lambda sms, acc, dy, x, rstd: rmsnorm.choose(x.shape[1], x.dtype, sms),
    "swiglu": lambda sms, h: swiglu.choose(h.shape[1] // 2, h.dtype, gated=False),
    "swiglu_dgrad": lambda sms, dy, h: swiglu.choose(h.shape[1] // 2, h.dtype, gated=False),
    "gated_swiglu": lambda sms, h, gate: swiglu.choose(h.shape[1] // 2, h.dtype, gated=True),
    "gated_swiglu_dgrad": lambda sms, dy, h, gate: swiglu.choose(h.shape[1] // 2, h.dtype, gated=True),
    "grouped_linear": lambda sms, x, w, offsets: _grouped(w, x, w, offsets, sms),
    "grouped_linear_dgrad": lambda sms, dy, w, offsets: _grouped(w, dy, w, offsets, sms),
    "grouped_linear_wgrad_": lambda sms, acc, dy, x, offsets: _grouped(acc, dy, x, offsets, sms),
}


def emit_kernel(op: str, arguments: tuple[Any, ...], num_sms: int) -> KernelFile | None:
    """The kernel file that holds function `op` for these arguments, or None where the reference op runs.

    `arguments` are those of the op's call, in order: `Buffer` for tensors (rows may be "R"), plain constants else.
    `num_sms` is how many SMs compute may use: the device's less those kept for communication. The text depends
    on nothing else, and not on the number of rows.
    """
    choose = KERNELS.get(op)
    choice = choose(num_sms, *arguments) if choose else None
    return render(choice) if choice else None
