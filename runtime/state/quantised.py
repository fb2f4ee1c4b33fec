"""Weights that products read in few bits: their data and scales, and both transposed for input gradients.

They are made of the parameters that segments would read else, once after each step of the optimizer that changes them,
and are no state: a checkpoint does not have them. The names in which segments find them are those that
`compiler/model/segments/unpack.py` has.
Where gradients are rounded stochastically, a weight has a key beside them: the seed, the step and a number of its own,
which the random numbers for the gradients of its product depend on (`runtime.ops.stochastic`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from runtime.build.build import Build
from runtime.build.kernels import Op, on_cuda
from runtime.contract import RunPlan
from runtime.ops import OPS

KEY = "_key"


@dataclass(frozen=True)
class QuantisedWeight:
    """A tensor of a rank, by its name in the namespace of parameters, and the op that makes it of few bits."""

    name: str
    by: Op
    suffixes: tuple[str, ...]  # of the names of what the op returns, and of a key
    number: int  # of the tensor, for its key

    @property
    def is_keyed(self) -> bool:
        """Whether there is a key beside it, which is another one in each step."""
        return self.suffixes[-1] == KEY

    def make(self, parameters: SimpleNamespace, seed: int, step: int) -> None:
        """Put the tensors into the namespace. Those of the last step go first, so that both are never there."""
        names = [f"{self.name}{suffix}" for suffix in self.suffixes]
        for name in names:
            vars(parameters).pop(name, None)
        found = self.by(getattr(parameters, self.name))
        if self.is_keyed:
            found += (torch.tensor([seed, step, self.number], device=found[0].device),)
        vars(parameters).update(zip(names, found, strict=True))


def quantised_weights(build: Build, plan: RunPlan, held: Iterable[str]) -> tuple[QuantisedWeight, ...]:
    """Those of the tensors that a rank holds."""
    tensors = {*held}
    found = []
    for each in plan.quantised:
        if each.tensor in tensors:
            op = OPS[each.op]
            path = build.path(f"kernels/{each.kernel}.py") if each.kernel else None
            by = on_cuda(str(path), each.kernel, op) if path and each.kernel else op
            by = _whole(by) if each.op == "quantise_blocks" else by
            number = int.from_bytes(hashlib.sha256(each.tensor.encode()).digest()[:8], signed=True)
            found.append(QuantisedWeight(each.tensor.replace(".", "_"), by, each.suffixes, number))
    return tuple(found)


def _whole(by: Op) -> Op:
    """`quantise_blocks`, whose scales of the transposed data are those of the data, transposed: with these."""

    def whole(w: Tensor) -> tuple[Tensor, ...]:
        data, scales, data_t = by(w)
        return data, scales, data_t, scales.transpose(-1, -2).contiguous()

    return whole
