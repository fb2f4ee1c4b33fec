"""Quantised weights for matrix products: data and scales, and both transposed for input gradients.

They are computed from the parameters after each optimizer step that changes these, and are not part of the state: a
checkpoint does not have them. `compiler/model/segments/unpack.py` defines the names under which segments read them.
If gradients are rounded stochastically, a weight also has a key: the seed, the step and its own number. The random
numbers for the gradients of its product depend on it (`runtime.ops.stochastic`).
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
    """A tensor of a rank, by its name in the namespace of parameters, and the op that quantises it."""

    name: str
    quantise: Op
    suffixes: tuple[str, ...]  # of the names of the op's results, and of a key
    number: int  # identifies the tensor in its key

    @property
    def is_keyed(self) -> bool:
        """Whether the weight has a key, which changes in each step."""
        return self.suffixes[-1] == KEY

    def make(self, parameters: SimpleNamespace, seed: int, step: int, in_place: bool = False) -> None:
        """Write the quantised tensors into the namespace. The old ones are freed first, so that both never coexist.

        `in_place`: they are written to the memory of the old ones instead, which graphs read.
        """
        names = [f"{self.name}{suffix}" for suffix in self.suffixes]
        old = [vars(parameters).pop(name, None) for name in names]
        if not in_place:
            old.clear()
        results = self.quantise(getattr(parameters, self.name))
        if self.is_keyed:
            results += (torch.tensor([seed, step, self.number], device=results[0].device),)
        if in_place:
            results = tuple(tensor.copy_(new) for tensor, new in zip(old, results, strict=True))
        vars(parameters).update(zip(names, results, strict=True))


def quantised_weights(build: Build, plan: RunPlan, names: Iterable[str]) -> tuple[QuantisedWeight, ...]:
    """Return the quantised weights of a rank. `names`: of the tensors that it holds."""
    tensors = {*names}
    weights = []
    for planned in plan.quantised:
        if planned.tensor in tensors:
            op = OPS[planned.op]
            path = build.path(f"kernels/{planned.kernel}.py") if planned.kernel else None
            quantise = on_cuda(str(path), planned.kernel, op) if path and planned.kernel else op
            quantise = _with_transposed_scales(quantise) if planned.op == "quantise_blocks" else quantise
            number = int.from_bytes(hashlib.sha256(planned.tensor.encode()).digest()[:8], signed=True)
            weights.append(QuantisedWeight(planned.tensor.replace(".", "_"), quantise, planned.suffixes, number))
    return tuple(weights)


def _with_transposed_scales(quantise: Op) -> Op:
    """Return `quantise_blocks` with the scales of the transposed data, which are the transposed scales."""

    def quantise_both(w: Tensor) -> tuple[Tensor, ...]:
        data, scales, data_t = quantise(w)
        return data, scales, data_t, scales.transpose(-1, -2).contiguous()

    return quantise_both
