"""The weights that products read quantised: their tensors, and the kernels that quantise them."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.emit.kernels import KernelFile, emit_kernel, reason
from compiler.emit.kernels.calls import KernelCall, quantising_calls
from compiler.ir import Plan
from runtime import contract


@dataclass(frozen=True)
class WeightQuantisation:
    """How a weight is quantised."""

    call: KernelCall
    kernel: KernelFile | None
    reason: str | None  # why there is no kernel
    suffixes: tuple[str, ...]  # of the names of its tensors

    @property
    def op(self) -> str:
        return self.call.op


def weight_quantisations(plan: Plan, num_sms: int) -> dict[str, WeightQuantisation]:
    """How each weight is quantised, in model order. Without a kernel the reference op runs on every device."""
    quantisations: dict[str, WeightQuantisation] = {}
    by_key: dict[object, dict[str, WeightQuantisation]] = {}
    for use in plan.uses:
        key, tensors = use.segment.key, dict(use.params)
        if key not in by_key:
            weights = {weight.param: weight for weight in plan.cuts[use.site].quantised}
            by_key[key] = {
                param: _quantisation(call, num_sms, tuple(weights[param].names_of("").values()))
                for param, call in quantising_calls(use.segment)
            }
        quantisations |= {tensors[param]: quantisation for param, quantisation in by_key[key].items()}
    return quantisations


def _quantisation(call: KernelCall, num_sms: int, suffixes: tuple[str, ...]) -> WeightQuantisation:
    file = emit_kernel(call.op, call.arguments, num_sms)
    return WeightQuantisation(call, file, None if file else reason(call.op, call.arguments), suffixes)


def rows(quantisations: dict[str, WeightQuantisation]) -> tuple[contract.QuantisedTensor, ...]:
    """The rows of plan.json for quantised weights."""
    return tuple(
        contract.QuantisedTensor(tensor, row.op, row.kernel.name if row.kernel else None, row.suffixes)
        for tensor, row in quantisations.items()
    )
