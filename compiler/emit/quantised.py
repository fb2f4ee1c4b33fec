"""The weights that products read in eight bits: their tensors, and the kernels that make them so."""

from __future__ import annotations

from compiler.ir import Plan
from compiler.kernels import KernelFile, emit_kernel
from compiler.kernels.calls import quantising
from runtime import contract


def quantised(plan: Plan, num_sms: int) -> dict[str, KernelFile | None]:
    """The kernel by tensor, in the order of the model; None where the reference op runs on every device."""
    found: dict[str, KernelFile | None] = {}
    by_key: dict[object, dict[str, KernelFile | None]] = {}
    for use in plan.uses:
        key, tensors = use.segment.key, dict(use.params)
        if key not in by_key:
            calls = quantising(use.segment)
            by_key[key] = {param: emit_kernel(call.op, call.arguments, num_sms) for param, call in calls}
        found |= {tensors[param]: file for param, file in by_key[key].items()}
    return found


def rows(files: dict[str, KernelFile | None]) -> tuple[contract.Quantised, ...]:
    """What the runtime is told of them."""
    return tuple(contract.Quantised(tensor, file.name if file else None) for tensor, file in files.items())
