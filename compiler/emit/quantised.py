"""The weights that products read in eight bits: their tensors, and the kernels that make them so."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.emit.kernels import KernelFile, emit_kernel, reason
from compiler.emit.kernels.calls import KernelCall, quantising
from compiler.ir import Plan
from runtime import contract


@dataclass(frozen=True)
class Making:
    """How a tensor is made of few bits: the op, its kernel or the reason that there is none, and how the names of its
    tensors end."""

    op: str
    kernel: KernelFile | None
    reason: str | None
    suffixes: tuple[str, ...]


def quantised(plan: Plan, num_sms: int) -> dict[str, Making]:
    """What makes each tensor, in the order of the model; without a kernel the reference op runs on every device."""
    found: dict[str, Making] = {}
    by_key: dict[object, dict[str, Making]] = {}
    for use in plan.uses:
        key, tensors = use.segment.key, dict(use.params)
        if key not in by_key:
            held = {each.param: each for each in plan.cuts[use.site].quantised}
            by_key[key] = {
                param: _making(call, num_sms, tuple(held[param].names_of("").values()))
                for param, call in quantising(use.segment)
            }
        found |= {tensors[param]: making for param, making in by_key[key].items()}
    return found


def _making(call: KernelCall, num_sms: int, suffixes: tuple[str, ...]) -> Making:
    file = emit_kernel(call.op, call.arguments, num_sms)
    return Making(call.op, file, None if file else reason(call.op, call.arguments), suffixes)


def rows(makings: dict[str, Making]) -> tuple[contract.QuantisedTensor, ...]:
    """What the runtime is told of them."""
    return tuple(
        contract.QuantisedTensor(tensor, each.op, each.kernel.name if each.kernel else None, each.suffixes)
        for tensor, each in makings.items()
    )
