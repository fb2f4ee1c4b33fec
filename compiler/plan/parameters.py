"""Every logical parameter of a model, from the segments that read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from compiler import ir
from compiler.ir import StageStep
from compiler.plan.blocks import model_steps
from dsl.closed_forms.counts import Parameters
from dsl.schema import BUILT_IN, AdamW, Data, Model, Moe, Parallel, Spec, Train
from dsl.schema.cluster import Cluster, Device, Machine
from runtime.contract.names import BIAS, TABLE, WEIGHT, ParameterName, StoredName
from runtime.contract.weights import is_adapter


@dataclass(frozen=True, slots=True)
class SegmentTensor:
    """A tensor that segments read by name: a logical parameter, or those of all experts of a layer."""

    name: str  # layers.3.ffn.experts.up
    shape: tuple[int, ...]  # of the logical parameter of one expert
    role: ir.Role
    init: float | None  # standard deviation; None: ones; a bias starts at zero
    decay: bool
    num_experts: int | None = None
    uniform: bool = False
    split: ir.TensorSplit | None = None
    matrices: tuple[int, ...] = ()  # rows of each matrix in one logical parameter (`ir.Param`)
    mean: float = 0.0

    def names(self) -> list[str]:
        """The names of the logical parameters, such as layers.3.ffn.experts.17.up for expert 17."""
        if self.num_experts is None:
            return [self.name]
        prefix, _, local = self.name.rpartition(".")
        return [f"{prefix}.{e}.{local}" for e in range(self.num_experts)]


@dataclass(frozen=True, slots=True)
class LogicalParameter:
    """A logical parameter. Each expert of a layer has its own."""

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


def tensors(spec: Spec, steps: Iterable[StageStep]) -> tuple[SegmentTensor, ...]:
    """Every tensor of the steps once, in the order of the model. The MTP block reads the embedding and head again."""
    entries: dict[str, tuple[ir.Param, SegmentTensor]] = {}
    for step in steps:
        if isinstance(step, ir.Use):
            for param, (_, name) in zip(step.segment.params, step.params, strict=True):
                if name not in entries:
                    entries[name] = (param, _tensor(spec, param, name))
                first = entries[name][0]
                alike = [(p.shape, p.role, p.init, p.decay, p.uniform, p.mean, p.split) for p in (first, param)]
                assert alike[0] == alike[1], f"{name} is declared in two ways"
    return tuple(tensor for _, tensor in entries.values())


def parameters(spec: Spec) -> tuple[LogicalParameter, ...]:
    """All logical parameters, in the order of the model."""
    return tuple(
        LogicalParameter(
            name, row.name, row.shape, row.role, row.init, row.decay, *([e, row.num_experts] if experts else [])
        )
        for row in tensors(spec, model_steps(spec))
        for experts in [row.num_experts is not None]
        for e, name in enumerate(row.names())
    )


def model_parameters(model: Model) -> tuple[LogicalParameter, ...]:
    """The logical parameters in a checkpoint of a model, in the order of the model."""
    machine = Machine(devices=1, device=Device(name="cpu", memory=1))
    outline = Spec.model_construct(
        model=model,
        cluster=Cluster(name="one", nodes=1, node=machine),
        precision=BUILT_IN["fp32"],
        parallel=Parallel(pipeline=1, data=1, expert=1),
        train=Train.model_construct(sequence=1, micro_batch=1, optimizer=AdamW()),
        data=Data.model_construct(),
    )
    return parameters(outline)


def stored_name(parameter: LogicalParameter) -> StoredName:
    return StoredName.of(parameter.role if parameter.role in (BIAS, TABLE) else WEIGHT, parameter.name)


def count_parameters(spec: Spec, steps: Iterable[StageStep]) -> Parameters:
    """The numbers of parameters of a model, summed over its layers, without adapters. `steps`: of the whole model."""
    sizes, idle = Counter[str](), 0
    norms = [f"layers.0.attention.{name}" for name in ("norm", "post_norm")]
    for row in tensors(spec, steps):
        if row.role in ("slots", "table") or is_adapter(row.name):
            continue
        size, name = prod(row.shape), ParameterName(row.name)
        sizes[name.part] += size * (row.num_experts or 1)
        sizes["bias"] += size if row.role == "bias" and name.part != "mtp" else 0
        sizes["attention"] += size if name.layer == 0 and name.is_of_attention and name not in norms else 0
        if row.num_experts is not None and name.layer is not None:
            ffn = spec.model.ffn(name.layer)
            assert isinstance(ffn, Moe), row.name
            idle += size * (row.num_experts - ffn.top_k)
    total = sum(sizes[part] for part in ("embedding", "head", "layers", "final_hyper", "final_norm"))
    return Parameters(
        total=total,
        active=total - idle,
        active_without_embedding=total - idle - sizes["embedding"],
        embedding=sizes["embedding"],
        head=sizes["head"],
        attention=sizes["attention"],
        mtp=sizes["mtp"],
        bias=sizes["bias"],
    )


def _tensor(spec: Spec, param: ir.Param, name: str) -> SegmentTensor:
    shape, experts = (param.shape[1:], num_experts(spec.model, name)) if param.stack else (param.shape, None)
    shape = param.split.full_shape(shape) if param.split else shape
    facts = param.role, param.init, param.decay, experts, param.uniform, param.split, param.matrices, param.mean
    return SegmentTensor(name, shape, *facts)


def num_experts(model: Model, tensor: str) -> int:
    """The experts of the layer, or MTP block, of a tensor."""
    block, number, *_ = tensor.split(".")
    ffn = model.ffn(int(number) if block == "layers" else model.num_layers - 1)
    assert isinstance(ffn, Moe), tensor
    return ffn.experts
