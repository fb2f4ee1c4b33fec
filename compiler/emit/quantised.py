"""The weights that products read quantised: their tensors, and the kernels that quantise them."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.emit.kernels import KernelFile, emit_kernel, reason
from compiler.emit.kernels.calls import KernelCall, quantising
from compiler.ir import Plan
from runtime import contract


@dataclass(frozen=True)
class Making:
    """How a weight is quantised."""

    call: KernelCall
    kernel: KernelFile | None
    reason: str | None  # why there is no kernel
    suffixes: tuple[str, ...]  # of the names of its tensors

    @property
    def op(self) -> str:
        return self.call.op


def quantised(plan: Plan, num_sms: int) -> dict[str, Making]:
    """How each weight is quantised, in model order. Without a kernel the reference op runs on every device."""
    makings: dict[str, Making] = {}
    by_key: dict[object, dict[str, Making]] = {}
    for use in plan.uses:
        key, tensors = use.segment.key, dict(use.params)
        if key not in by_key:
            weights = {weight.param: weight for weight in plan.cuts[use.site].quantised}
            by_key[key] = {
                param: _making(call, num_sms, tuple(weights[param].names_of("").values()))
                for param, call in quantising(use.segment)
            }
        makings |= {tensors[param]: making for param, making in by_key[key].items()}
    return makings


def _making(call: KernelCall, num_sms: int, suffixes: tuple[str, ...]) -> Making:
    file = emit_kernel(call.op, call.arguments, num_sms)
    return Making(call, file, None if file else reason(call.op, call.arguments), suffixes)


def rows(makings: dict[str, Making]) -> tuple[contract.QuantisedTensor, ...]:
    """The rows of plan.json for quantised weights."""
    return tuple(
        contract.QuantisedTensor(tensor, making.op, making.kernel.name if making.kernel else None, making.suffixes)
        for tensor, making in makings.items()
    )
