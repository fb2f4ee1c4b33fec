"""Every logical parameter of a model, from the segments that read it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from compiler import ir
from compiler.plan.blocks import Step, model_steps
from dsl.schema import Moe, Spec


@dataclass(frozen=True, slots=True)
class Tensor:
    """What segments read under one name: a logical parameter, or those of all experts of a layer."""

    name: str  # layers.3.ffn.experts.up
    shape: tuple[int, ...]  # of one expert
    role: ir.Role
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    num_experts: int | None = None

    def names(self) -> list[str]:
        """Of the logical parameters: layers.3.ffn.experts.17.up is the one of expert 17."""
        if self.num_experts is None:
            return [self.name]
        prefix, _, local = self.name.rpartition(".")
        return [f"{prefix}.{e}.{local}" for e in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A logical parameter. Experts have one each, by their number in the whole layer."""

    name: str  # layers.3.ffn.experts.17.up
    tensor: str  # layers.3.ffn.experts.up
    shape: tuple[int, ...]
    role: ir.Role
    init: float | None
    decay: bool
    expert: int | None = None
    num_experts: int | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def tensors(spec: Spec, steps: Iterable[Step]) -> tuple[Tensor, ...]:
    """In the order of the model, each once: the MTP block reads the main embedding and head again."""
    found: dict[str, tuple[ir.Param, Tensor]] = {}
    for step in steps:
        if isinstance(step, ir.Use):
            for param, (_, name) in zip(step.segment.params, step.params, strict=True):
                if name not in found:
                    found[name] = (param, _tensor(spec, param, name))
                first = found[name][0]
                alike = [(p.shape, p.role, p.init, p.decay) for p in (first, param)]
                assert alike[0] == alike[1], f"{name} is declared in two ways"
    return tuple(tensor for _, tensor in found.values())


def parameters(spec: Spec) -> tuple[Parameter, ...]:
    """All logical parameters, in the order of the model."""
    return tuple(
        Parameter(name, row.name, row.shape, row.role, row.init, row.decay, *([e, row.num_experts] if experts else []))
        for row in tensors(spec, model_steps(spec))
        for experts in [row.num_experts is not None]
        for e, name in enumerate(row.names())
    )


def _tensor(spec: Spec, param: ir.Param, name: str) -> Tensor:
    shape, experts = (param.shape[1:], _num_experts(spec, name)) if param.stack else (param.shape, None)
    return Tensor(name, shape, param.role, param.init, param.decay, experts)


def _num_experts(spec: Spec, tensor: str) -> int:
    model = spec.model
    block, number, *_ = tensor.split(".")
    ffn = model.ffn(int(number) if block == "layers" else model.num_layers - 1)
    assert isinstance(ffn, Moe), tensor
    return ffn.experts
