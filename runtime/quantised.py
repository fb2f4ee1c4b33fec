"""Weights that products read in eight bits: their data and scales, and both transposed for input gradients.

They are made of the parameters that segments would read else, once after each step of the optimizer, and are no state:
a checkpoint does not have them. The names in which segments find them are those that `compiler/segments/unpack.py` has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

from runtime.build import Build
from runtime.contract import Plan
from runtime.kernels import Op, on_cuda
from runtime.ops import OPS

SUFFIXES = ("_fp8", "_scales", "_fp8_t", "_scales_t")


@dataclass(frozen=True)
class QuantisedWeight:
    """A tensor of a rank, by its name in the namespace of parameters, and the op that makes it of eight bits."""

    name: str
    by: Op

    def make(self, parameters: SimpleNamespace) -> None:
        """Put the tensors into the namespace. Those of the last step go first, so that both are never there."""
        names = [f"{self.name}{suffix}" for suffix in SUFFIXES]
        for name in names:
            vars(parameters).pop(name, None)
        data, scales, data_t = self.by(getattr(parameters, self.name))
        found = data, scales, data_t, scales.transpose(-1, -2).contiguous()
        vars(parameters).update(zip(names, found, strict=True))


def quantised_weights(build: Build, plan: Plan, held: Iterable[str]) -> tuple[QuantisedWeight, ...]:
    """Those of the tensors that a rank holds."""
    tensors, op = {*held}, OPS["quantise_blocks"]
    found = []
    for each in plan.quantised:
        if each.tensor in tensors:
            path = build.path(f"kernels/{each.kernel}.py") if each.kernel else None
            by = on_cuda(str(path), each.kernel, op) if path and each.kernel else op
            found.append(QuantisedWeight(each.tensor.replace(".", "_"), by))
    return tuple(found)
