"""Which tensors data ranks divide among them, and what their segments then put together (zero = 2 and 3).

Gradients, and weights at zero = 3, are divided over the holders of each pipeline rank: these run the same program in
the same order, so what they put together in the middle of it cannot hang. Where several pipeline ranks hold a tensor,
as those of a mirrored stage, each of them has all parts of it (docs/adr/0024-state-is-divided-by-segment.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import NamedTuple

from compiler.ir import Bucket, Buffer, Communication, Plan, Replica, Sharded, Stage, Use
from compiler.ir.dtypes import ITEMSIZE, TORCH_DTYPE
from dsl.schema import Optimizer, Spec

# --- Which rank owns the optimizer state of a parameter, where owners have parameters whole (ZeRO-1, arXiv 1910.02054)
#
# An optimizer that multiplies matrices, as Muon does, updates a parameter only where all of it is. So the holders of a
# bucket share it out by parameters; elsewhere they cut it into equal parts, and nobody has to be chosen.


def with_owners(
    buckets: Sequence[Bucket], replicas: Sequence[Replica], optimizer: Optimizer, zero: int
) -> tuple[Bucket, ...]:
    """The buckets with the owners of their parameters, the work of updates balanced over the ranks.

    Greedy: the parameter of most work first, each to the holder that has least so far, of equal ones the first.
    O(parameters · log holders).
    """
    if optimizer.unit != "matrix" or not zero:
        return tuple(buckets)
    work = {replica.key: work_of(optimizer, replica) for replica in replicas if replica.role in ("parameter", "still")}
    load = Counter[int]()
    found: dict[str, tuple[int, ...]] = {}
    whole = [bucket for bucket in buckets if not bucket.rest]
    for bucket in sorted(whole, key=lambda bucket: len(bucket.holders)):  # those with a choice come last
        found[bucket.name] = _owners(bucket, work, load)
    return tuple(replace(bucket, owners=found.get(bucket.name, ())) for bucket in buckets)


def flops_of(optimizer: Optimizer, replica: Replica) -> int:
    """FLOPs of the matrix products of one update of a parameter: of each of its matrices."""
    return sum(map(optimizer.of(replica.matrices).flops, replica.updated_shapes))


def work_of(optimizer: Optimizer, replica: Replica) -> int:
    """The work of one update of a parameter, for a comparison with others: its FLOPs, and one for each element."""
    return flops_of(optimizer, replica) + replica.num_elements


def _owners(bucket: Bucket, work: Mapping[str, int], load: Counter[int]) -> tuple[int, ...]:
    """The place among the holders of the owner of each parameter; `load` of each rank grows. Nothing for one holder."""
    holders = tuple(bucket.holders)
    if len(holders) == 1:
        load[holders[0]] += sum(work[name] for name in bucket.replicas)
        return ()
    least = [(load[rank], place) for place, rank in enumerate(holders)]
    heapify(least)
    owners = [0] * len(bucket.replicas)
    for index in sorted(range(len(owners)), key=lambda i: (-work[bucket.replicas[i]], i)):
        sum_, place = least[0]
        owners[index] = place
        heapreplace(least, (sum_ + work[bucket.replicas[index]], place))
    for sum_, place in least:
        load[holders[place]] = sum_
    return tuple(owners)


# --- sharding


def dividing_sites(stages: Sequence[Stage], replicas: Sequence[Replica], zero: int) -> Mapping[str, tuple[str, ...]]:
    """Tensor → the segments that read it, of each tensor that its holders divide."""
    divided = {
        replica.tensor
        for replica in replicas
        if zero >= 2 and replica.role == "parameter" and len(replica.holders.columns) > 1
    }
    found: dict[str, list[str]] = defaultdict(list)
    for use in (step for stage in stages for step in stage.steps if isinstance(step, Use)):
        for tensor in dict.fromkeys(tensor for _, tensor in use.params if tensor in divided):
            found[tensor].append(use.site)
    return {tensor: tuple(sites) for tensor, sites in found.items()}


def sharded_segments(
    spec: Spec, replicas: Sequence[Replica], buckets: Sequence[Bucket], rank_of: Mapping[str, int]
) -> dict[str, Sharded]:
    """What the segments put together, by site. Expert ranks hold as much as one another: the first stands for all.

    `rank_of`: a pipeline rank that runs the segment, by site; the first stands for all of them."""
    if spec.parallel.zero < 2:
        return {}
    of_replica = {replica.key: replica for replica in replicas}
    elements = {key: replica.num_elements for key, replica in of_replica.items()}
    found: dict[str, dict[frozenset[str], Bucket]] = defaultdict(dict)
    for bucket in buckets:
        for site in bucket.sites:
            found[site].setdefault(frozenset(of_replica[name].tensor for name in bucket.replicas), bucket)
    return {site: _sharded(spec, site, rank_of[site], of_tensors, elements) for site, of_tensors in found.items()}


def _sharded(
    spec: Spec, site: str, rank: int, of_tensors: Mapping[frozenset[str], Bucket], elements: Mapping[str, int]
) -> Sharded:
    parts = []
    for bucket in of_tensors.values():
        count = len(bucket.holders)
        parts.append((bucket.holders.on(rank), -(-sum(elements[name] for name in bucket.replicas) // count) * count))
    shape, prefix = (sum(size for _, size in parts),), site.replace(".", "_")
    weights = Buffer(f"{prefix}_weights", shape, TORCH_DTYPE[spec.precision.parameter])
    return Sharded(
        tensors=frozenset().union(*of_tensors),
        buckets=tuple(parts),
        gradients=Buffer(f"{prefix}_gradients", shape, TORCH_DTYPE[spec.precision.gradients]),
        weights=weights if spec.parallel.zero == 3 else None,
    )


class Crossing(NamedTuple):
    """Bytes that a device sends to those that it divides state with, and of rows to those that split layers with it."""

    gradients: int
    weights: int
    rows: int = 0

    @property
    def state(self) -> int:
        return self.gradients + self.weights


def crossing_of(plan: Plan, rank: int, num_micro_batches: int) -> Crossing:
    """What a device of a pipeline rank sends in a step while its actions run: of each tensor that is put together, all
    parts but its own. `num_micro_batches`: of the step, of which the ranks that hold a stage have equal parts."""
    gradients = weights = rows = 0
    for stage in plan.stages_of(rank):
        runs = num_micro_batches // len(plan.ranks_of_stage(stage))
        for step in plan.stages[stage].steps:
            if isinstance(step, Use) and (here := plan.sharded.get(step.site)) is not None:
                gathers, scatters = plan.moves_of(step)
                elements = sum(size - size // len(holders) for holders, size in here.buckets)
                gradients += runs * scatters * elements * ITEMSIZE[here.gradients.dtype]
                weights += runs * gathers * elements * ITEMSIZE[here.weights.dtype] if here.weights else 0
            if isinstance(step, Communication) and step.moves_rows:
                forward, backward = (*step.sizes, *step.outputs), (*step.arriving, *step.returned)
                parts = (forward, backward, *((forward,) if step.again else ()))
                ours = sum(min(each.fixed_bytes for each in part) for part in parts if part)
                rows += runs * (getattr(plan.mesh, step.axis) - 1) * ours
    return Crossing(gradients, weights, rows)
