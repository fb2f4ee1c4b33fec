"""The tensors that data ranks shard, and those that each segment then gathers or scatters (zero = 2 and 3).

Gradients, and weights with zero = 3, are sharded over the holders on each pipeline rank, or over each group of them
(`Parallel.shard`). These run the same program in the same order, so collectives inside it cannot hang. If several
pipeline ranks hold a tensor, as with a mirrored stage, each of them has all shards, and so has each group
(docs/adr/0024-state-is-divided-by-segment.md, docs/adr/0079-shards-may-have-copies.md).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from typing import NamedTuple

from compiler.ir import Bucket, Buffer, Communication, Plan, Replica, ShardedTensors, Stage, Use
from compiler.ir.dtypes import ITEMSIZE, TORCH_DTYPE
from dsl.schema import Optimizer, Parallel, Spec

# --- The owner of each parameter's optimizer state, if the optimizer updates whole matrices (ZeRO-1, arXiv 1910.02054)
#
# An optimizer that multiplies matrices, such as Muon, updates a parameter on a rank that has all of it. The holders of
# a bucket therefore share out its parameters. With other optimizers they cut the bucket into equal parts, and no owner
# has to be chosen.


def with_owners(
    buckets: Sequence[Bucket], replicas: Sequence[Replica], optimizer: Optimizer, zero: int
) -> tuple[Bucket, ...]:
    """The buckets with the owners of their parameters, so that the work of updates is balanced over the ranks.

    Greedy: parameters in descending order of work go to the holder with the least work so far, the first of equals.
    Takes O(parameters · log holders) time.
    """
    if optimizer.unit != "matrix" or not zero:
        return tuple(buckets)
    work = {replica.key: work_of(optimizer, replica) for replica in replicas if replica.role in ("parameter", "still")}
    load = Counter[int]()
    owners: dict[str, tuple[int, ...]] = {}
    matrix_buckets = [bucket for bucket in buckets if not bucket.is_of_rest]
    for bucket in sorted(matrix_buckets, key=lambda bucket: len(bucket.holders)):  # those with most choice come last
        owners[bucket.name] = _owners(bucket, work, load)
    return tuple(replace(bucket, owners=owners.get(bucket.name, ())) for bucket in buckets)


def flops_of(optimizer: Optimizer, replica: Replica) -> int:
    """FLOPs of the matrix products in one update of a parameter, over all of its matrices."""
    return sum(map(optimizer.row_of(replica.matrices).flops, replica.updated_shapes))


def work_of(optimizer: Optimizer, replica: Replica) -> int:
    """The work of one update of a parameter, for comparisons: its FLOPs, plus one per element."""
    return flops_of(optimizer, replica) + replica.num_elements


def _owners(bucket: Bucket, work: Mapping[str, int], load: Counter[int]) -> tuple[int, ...]:
    """For each parameter, the index of its owner among the holders; empty for one holder. Adds the work to `load`."""
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


def dividing_sites(
    stages: Sequence[Stage], replicas: Sequence[Replica], parallel: Parallel
) -> Mapping[str, tuple[str, ...]]:
    """Sharded tensor → the segments that read it."""
    divided = {
        replica.tensor
        for replica in replicas
        if parallel.zero >= 2 and replica.role == "parameter" and replica.holders.num_shards(parallel.copies) > 1
    }
    sites_of: dict[str, list[str]] = defaultdict(list)
    for use in (step for stage in stages for step in stage.steps if isinstance(step, Use)):
        for tensor in dict.fromkeys(tensor for _, tensor in use.params if tensor in divided):
            sites_of[tensor].append(use.site)
    return {tensor: tuple(sites) for tensor, sites in sites_of.items()}


def sharded_segments(
    spec: Spec, replicas: Sequence[Replica], buckets: Sequence[Bucket], rank_of: Mapping[str, int]
) -> dict[str, ShardedTensors]:
    """By site, the sharded tensors of a segment. Expert ranks hold equally much, so the first stands for all.

    `rank_of`: by site, a pipeline rank that runs the segment and stands for all of them.
    """
    if spec.parallel.zero < 2:
        return {}
    of_replica = {replica.key: replica for replica in replicas}
    elements = {key: replica.num_elements for key, replica in of_replica.items()}
    buckets_of: dict[str, dict[frozenset[str], Bucket]] = defaultdict(dict)
    for bucket in buckets:
        for site in bucket.sites:
            buckets_of[site].setdefault(frozenset(of_replica[name].tensor for name in bucket.replicas), bucket)
    return {
        site: _sharded_tensors(spec, site, rank_of[site], of_tensors, elements)
        for site, of_tensors in buckets_of.items()
    }


def _sharded_tensors(
    spec: Spec, site: str, rank: int, of_tensors: Mapping[frozenset[str], Bucket], elements: Mapping[str, int]
) -> ShardedTensors:
    parts = []
    for bucket in of_tensors.values():
        count = len(bucket.holders)
        parts.append((bucket.sharing(rank), -(-sum(elements[name] for name in bucket.replicas) // count) * count))
    shape, prefix = (sum(size for _, size in parts),), site.replace(".", "_")
    weights = Buffer(f"{prefix}_weights", shape, TORCH_DTYPE[spec.precision.parameter])
    return ShardedTensors(
        tensors=frozenset().union(*of_tensors),
        buckets=tuple(parts),
        gradients=Buffer(f"{prefix}_gradients", shape, TORCH_DTYPE[spec.precision.gradients]),
        weights=weights if spec.parallel.zero == 3 else None,
    )


class Crossing(NamedTuple):
    """Bytes that a device sends in a step."""

    gradients: int  # to the devices that share its shards
    weights: int  # likewise
    rows: int = 0  # to tensor and context ranks that split layers with it

    @property
    def state(self) -> int:
        return self.gradients + self.weights


def crossing_of(plan: Plan, rank: int, num_micro_batches: int) -> Crossing:
    """Bytes that a device of a pipeline rank sends in the actions of a step: of each sharded tensor, all other shards.

    `num_micro_batches`: of the step. The ranks that hold a stage run equally many of them.
    """
    gradients = weights = rows = 0
    for stage in plan.stages_of(rank):
        runs = num_micro_batches // len(plan.ranks_of_stage(stage))
        for step in plan.stages[stage].steps:
            if isinstance(step, Use) and (shards := plan.sharded.get(step.site)) is not None:
                gathers, scatters = plan.moves_of(step)
                elements = sum(size - size // len(holders) for holders, size in shards.buckets)
                gradients += runs * scatters * elements * ITEMSIZE[shards.gradients.dtype]
                weights += runs * gathers * elements * ITEMSIZE[shards.weights.dtype] if shards.weights else 0
            if isinstance(step, Communication) and step.moves_rows:
                forward, backward = (*step.sizes, *step.outputs), (*step.arriving, *step.returned)
                parts = (forward, backward, *((forward,) if step.is_repeated else ()))
                shard_bytes = sum(min(buffer.fixed_bytes for buffer in part) for part in parts if part)
                rows += runs * (getattr(plan.mesh, step.axis) - 1) * shard_bytes
    return Crossing(gradients, weights, rows)
