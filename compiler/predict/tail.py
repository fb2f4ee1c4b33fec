"""The tail of a step, after its last action: gradients are reduced, clipped and applied, and weights are gathered.

Reductions count only as far as they do not overlap with the backward (compiler/predict/times.py). All else begins after
the backward, as in the program (runtime/step/trainer.py). For comparison: ZeRO, arXiv 1910.02054, §5.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from compiler.ir import Plan
from compiler.ir.holders import Holders
from compiler.machine.rates.rates import Rates
from compiler.machine.topology.fabric import ReductionKind
from compiler.plan.sharding import flops_of
from compiler.predict.memory_state import kept_elements, max_owned_amounts
from compiler.predict.prediction import Tail
from dsl.closed_forms.memory import HOST_PART, ITEMSIZE, average_dtype, offloaded_bytes, update_bytes
from dsl.schema import Spec
from runtime.contract.mesh import Mesh

Reduce = Callable[[float, Holders, ReductionKind], float]  # (bytes on a device, their holders, kind) → seconds


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """The work of a device in an update."""

    elements: int  # that the first row of the optimizer updates
    flops: int  # of the matrix products of their update
    rest_elements: int = 0  # elements that the last row updates (`Optimizer.rest`)


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with the same holders and stages, which are reduced together."""

    holders: Holders
    stages: tuple[int, ...]
    elements: int  # of all parameters, before sharding
    is_of_rest: bool = False  # whether the last of the rows of the optimizer updates them

    def shard(self, spec: Spec, zero: int) -> Group:
        """The shard that a device keeps of a tensor that is sharded from level `zero` (2 or 3) on, and its holders.

        The holders in a group of columns share the tensor out, so one in each group keeps the same shard.
        """
        if spec.parallel.zero < zero:
            return self
        copies = spec.parallel.copies
        parts = self.holders.num_shards(copies)
        if parts == 1:
            return self
        return Group(self.holders.alike(copies), self.stages, -(-self.elements // parts), self.is_of_rest)


def groups_of(plan: Plan, rank: int) -> tuple[Group, ...]:
    """The trained parameters of the first device of a pipeline rank, by holders, stages and row of the optimizer."""
    sizes: dict[tuple[Holders, tuple[int, ...], bool], int] = defaultdict(int)
    for bucket in plan.buckets:
        if not bucket.is_still and plan.mesh.rank(rank, 0) in bucket.holders:
            key = bucket.holders, bucket.stages, bucket.is_of_rest
            sizes[key] += plan.bucket_elements[bucket.name]
    return tuple(Group(holders, stages, size, is_rest) for (holders, stages, is_rest), size in sizes.items())


def works_of(spec: Spec, plan: Plan, groups: Sequence[Sequence[Group]]) -> tuple[UpdateWork, ...]:
    """The most work of a device of each pipeline rank in an update. `groups`: the groups of each rank."""
    optimizer, zero = spec.train.optimizer, spec.parallel.zero
    if optimizer.unit == "element":
        shards = [
            [(group.elements, len(group.holders) if zero else 1) for group in rank_groups] for rank_groups in groups
        ]
        return tuple(UpdateWork(sum(-(-elements // parts) for elements, parts in of_rank), 0) for of_rank in shards)
    flops = {replica.key: flops_of(optimizer, replica) for replica in plan.replicas if replica.role == "parameter"}
    elements = kept_elements(spec, plan)
    if zero:
        products = max_owned_amounts(plan, flops)
    else:
        products = Counter[int]()
        for bucket in (bucket for bucket in plan.buckets if not bucket.is_still):
            for rank in (rank for rank in range(plan.mesh.pp) if plan.mesh.rank(rank, 0) in bucket.holders):
                products[rank] += sum(flops[name] for name in bucket.replicas)
    return tuple(
        UpdateWork(elements.owned[rank], products[rank], elements.owned_by_rest[rank]) for rank in range(plan.mesh.pp)
    )


def reduce_seconds(
    spec: Spec, groups: Iterable[Sequence[Group]], reduce_s: Reduce
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], float]:
    """(pipeline ranks, stages) → seconds to reduce their gradients. `groups`: the groups of each pipeline rank."""
    size = ITEMSIZE[spec.precision.gradients]
    seconds_of: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = defaultdict(float)
    for group in (group.shard(spec, 2) for group in {group for rank_groups in groups for group in rank_groups}):
        if len(group.holders) > 1:
            seconds = reduce_s(group.elements * size, group.holders, reduction_of(spec))
            seconds_of[group.holders.pipeline_ranks, group.stages] += seconds
    return seconds_of


def reduction_of(spec: Spec) -> ReductionKind:
    """The collective that reduces gradients. Gloo, which serves CPUs, has no reduce-scatter."""
    return "reduce_scatter" if spec.parallel.zero and spec.cluster.node.device.bf16 else "all_reduce"


def tail_of(spec: Spec, mesh: Mesh, groups: Sequence[Group], work: UpdateWork, reduce_s: Reduce, rates: Rates) -> Tail:
    """Seconds of the tail of a device with these groups, work and rates, if no reduction overlaps with the backward."""
    precision, zero, optimizer = spec.precision, spec.parallel.zero, spec.train.optimizer
    gradient, weight = ITEMSIZE[precision.gradients], ITEMSIZE[precision.parameter]
    update_s = rates.optimizer_time_s
    summed, gathered = ([group.shard(spec, level) for group in groups] for level in (2, 3))
    cleared = sum(group.elements for group in summed)
    sums = reduction_of(spec)
    touched = [update_bytes(precision, row) for row in optimizer.rows]
    if spec.train.ema and not spec.has_hosts:  # on a CPU it cannot overlap with the next step
        touched = [size + 2 * ITEMSIZE[average_dtype(precision)] + ITEMSIZE[precision.master] for size in touched]
    moved = work.elements * touched[0] + work.rest_elements * touched[-1]
    # Accumulators are cleared for the next step.
    update_only_s = update_s(moved + cleared * gradient) + rates.product_time_s(work.flops)
    clipped = optimizer.clip is not None
    everyone = Holders(tuple(range(mesh.pp)), range(mesh.columns), mesh.columns)
    return Tail(
        reduction_s=sum(reduce_s(group.elements * gradient, group.holders, sums) for group in summed),
        gather_s=sum(reduce_s(group.elements * weight, group.holders, "all_gather") for group in gathered if zero),
        norm_s=update_s((work.elements + work.rest_elements) * gradient) + reduce_s(8, everyone, "all_reduce")
        if clipped
        else 0.0,
        update_s=update_only_s,
        host_s=host_wait_s(spec, work, update_only_s, rates),
    )


def host_wait_s(spec: Spec, work: UpdateWork, update_s: float, rates: Rates) -> float:
    """Seconds for which an update waits for offloaded state.

    It waits until the first part has come and the last has gone, and for transfers that take longer than the update.
    """
    rows = spec.train.optimizer.rows
    away, away_of_rest = (offloaded_bytes(spec, row) for row in (rows[0], rows[-1]))
    if not away:
        return 0.0
    way_s = rates.host_time_s(away * work.elements + away_of_rest * work.rest_elements)
    part_s = rates.host_time_s(away * min(HOST_PART, work.elements))
    return max(0.0, way_s - update_s) + 2 * part_s
