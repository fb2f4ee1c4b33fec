"""Every logical parameter of a model, from the segments that read it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from compiler import ir
from compiler.layers.stages import model_steps
from dsl.schema import Moe, Spec


@dataclass(frozen=True, slots=True)
class Parameter:
    """A logical parameter. Experts have one each, by their number in the whole layer."""

    name: str  # layers.3.ffn.experts.17.up
    tensor: str  # layers.3.ffn.experts.up: what segments take
    shape: tuple[int, ...]
    role: Literal["parameter", "bias"]
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    expert: int | None = None
    num_experts: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def parameters(spec: Spec) -> tuple[Parameter, ...]:
    """In the order of the model, each once: the MTP block reads the main embedding and head again."""
    rows: dict[str, Parameter] = {}
    for step in model_steps(spec):
        if isinstance(step, ir.Use):
            for param, (_, tensor) in zip(step.segment.params, step.params, strict=True):
                for row in _rows(spec, param, tensor):
                    assert rows.setdefault(row.name, row) == row, f"{row.name} is read in two shapes"
    return tuple(rows.values())


def _rows(spec: Spec, param: ir.Param, tensor: str) -> list[Parameter]:
    """The logical parameters of one tensor of a segment: a stacked tensor holds one for each expert."""
    norm = param.name.endswith("norm")
    init = None if norm else spec.model.init_std if param.grad else 0.0
    decay = param.grad and not norm
    role: Literal["parameter", "bias"] = "parameter" if param.grad else "bias"
    if not param.stack:
        return [Parameter(tensor, tensor, param.shape, role, init, decay)]
    num_experts = _num_experts(spec, tensor)
    prefix, _, local = tensor.rpartition(".")
    return [
        Parameter(f"{prefix}.{e}.{local}", tensor, param.shape[1:], role, init, decay, e, num_experts)
        for e in range(num_experts)
    ]


def _num_experts(spec: Spec, tensor: str) -> int:
    model = spec.model
    block, number, *_ = tensor.split(".")
    ffn = model.ffn(int(number) if block == "layers" else model.num_layers - 1)
    assert isinstance(ffn, Moe), tensor
    return ffn.experts
