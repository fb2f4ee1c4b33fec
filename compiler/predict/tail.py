"""What follows the last action of a step: gradients are summed and scattered, clipped, applied, and weights gathered.

Nothing of it is overlapped with the backward, as in the program (runtime/trainer.py). For comparison: ZeRO,
arXiv 1910.02054, §5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from compiler.holders import Holders
from compiler.ir import Mesh, Param, Plan, Use
from compiler.predict.prediction import Tail
from compiler.topology.fabric import Reduction
from dsl.memory import ITEMSIZE
from dsl.schema import Spec

Reduce = Callable[[float, Holders, Reduction], float]  # bytes of a device, who holds them, how → seconds


@dataclass(frozen=True, slots=True)
class Tensor:
    """A trained tensor : on every data rank of its pipeline ranks, or a stack of experts on every ep-th."""

    pipeline_ranks: tuple[int, ...]
    elements: int  # on a device
    stacked: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that the same devices hold: one reduction."""

    holders: Holders
    elements: int  # on each of them


def tensors_of(plan: Plan) -> dict[str, Tensor]:
    """Every trained tensor of a plan, in closed form from its stages."""
    ranks: dict[str, set[int]] = defaultdict(set)
    params: dict[str, Param] = {}
    for stage in plan.stages:
        holding = plan.ranks_of_stage(stage.index)
        for use in stage.steps:
            if isinstance(use, Use):
                for param, (_, name) in zip(use.segment.params, use.params, strict=True):
                    if param.grad:
                        ranks[name].update(holding)
                        params[name] = param
    return {
        name: Tensor(tuple(sorted(ranks[name])), prod(param.shape), param.stack > 0) for name, param in params.items()
    }


def groups_of(mesh: Mesh, tensors: Iterable[Tensor], rank: int) -> tuple[Group, ...]:
    """The trained parameters of the first device of a pipeline rank, by who else holds them."""
    held: dict[Holders, int] = defaultdict(int)
    for each in tensors:
        if rank in each.pipeline_ranks:
            held[Holders(each.pipeline_ranks, range(0, mesh.dp, mesh.ep if each.stacked else 1), mesh.dp)] += (
                each.elements
            )
    return tuple(Group(holders, elements) for holders, elements in held.items())


def tail_of(
    spec: Spec, mesh: Mesh, groups: Sequence[Group], reduce_s: Reduce, update_s: Callable[[float], float]
) -> Tail:
    """Seconds of the tail of a device that holds these groups; `update_s`: of reading and writing so many bytes."""
    precision, zero, clip = spec.precision, spec.parallel.zero, spec.train.optimizer.clip
    gradient, weight = ITEMSIZE[precision.gradients], ITEMSIZE[precision.parameter]
    elements = sum(group.elements for group in groups)
    owned = sum(-(-group.elements // len(group.holders)) if zero else group.elements for group in groups)
    # Gloo, which serves devices without peaks, has no reduce-scatter.
    sums: Reduction = "reduce_scatter" if zero and spec.cluster.node.device.bf16 else "all_reduce"
    # Read: gradient, master, moments. Written: master, moments, the weights where they are others than the master.
    apart = weight if precision.parameter != precision.master else 0
    touched = gradient + 2 * ITEMSIZE[precision.master] + 4 * ITEMSIZE[precision.moments] + apart
    everyone = Holders(tuple(range(mesh.pp)), range(mesh.dp), mesh.dp)
    return Tail(
        reduction_s=sum(reduce_s(group.elements * gradient, group.holders, sums) for group in groups),
        gather_s=sum(reduce_s(group.elements * weight, group.holders, "all_gather") for group in groups if zero),
        norm_s=update_s(owned * gradient) + reduce_s(8, everyone, "all_reduce") if clip is not None else 0.0,
        update_s=update_s(owned * touched + elements * gradient),  # accumulators are cleared for the next step
    )
