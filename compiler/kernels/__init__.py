"""Triton kernels as emitted source: one row for each op that has one, its reference being the op in `runtime/ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.kernels import (
    adamw,
    attention,
    cross_entropy,
    embedding,
    grouped_linear,
    grouped_linear_fp8,
    linear_cross_entropy,
    linear_fp8,
    permute,
    permute_gate,
    quantise,
    rmsnorm,
    rmsnorm_quantise,
    route,
    sequence_balance,
    swiglu,
    swiglu_quantise,
    unpermute,
)
from compiler.kernels.kernel import Choice, KernelFile, render

__all__ = ["KERNELS", "KernelFile", "emit_kernel"]

# op → its choice, from the number of SMs and the op's own arguments. Ops that share a file make the same choice.
KERNELS: dict[str, Callable[..., Choice | None]] = {
    **adamw.OPS,
    **attention.OPS,
    **cross_entropy.OPS,
    **embedding.OPS,
    **grouped_linear.OPS,
    **grouped_linear_fp8.OPS,
    **linear_cross_entropy.OPS,
    **linear_fp8.OPS,
    **permute.OPS,
    **permute_gate.OPS,
    **quantise.OPS,
    **rmsnorm.OPS,
    **rmsnorm_quantise.OPS,
    **route.OPS,
    **sequence_balance.OPS,
    **swiglu.OPS,
    **swiglu_quantise.OPS,
    **unpermute.OPS,
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
