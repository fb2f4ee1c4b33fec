"""What a device of each pipeline rank holds all the time: weights, gradients, and its part of the optimizer's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from operator import add
from typing import NamedTuple

from compiler.ir import Bucket, Plan, Replica, Use
from compiler.ir.dtypes import ITEMSIZE as BYTES
from compiler.model.layers.moe import TABLE_DTYPE
from compiler.program.proof import Certificate
from dsl.closed_forms.memory import (
    HOST_PART,
    HOST_SLOTS,
    ITEMSIZE,
    Memory,
    average_dtype,
    bytes_per_element,
    offloaded_bytes,
    state_bytes,
)
from dsl.schema import Device, Spec


class Elements(NamedTuple):
    """Elements of parameters, with padding: of those that devices keep, and of those that they update at most."""

    weights: Counter[int]  # by pipeline rank
    gradients: Counter[int]
    owned: Counter[int]
    rest: Counter[int]  # that the last of the rows of the optimizer updates


def rank_states(spec: Spec, plan: Plan) -> tuple[Memory, ...]:
    """Bytes of the fullest device of every pipeline rank; activations are left at 0.

    Parameters with the same holders lie in one flat buffer. With ZeRO it is padded to equal parts, of which each holder
    updates one (arXiv 1910.02054), or holders own whole parameters (compiler/plan/owners.py); of buckets that segments
    put together, it keeps the parts of those that it divides them with (`Bucket.parts`), of gradients (zero = 2) and of
    weights (zero = 3). The balancing biases have the dtype of gradients, tables four bytes an element. Weights that
    products read in eight bits are held so twice more.
    """
    rows = [bytes_per_element(spec, row) for row in spec.train.optimizer.rows]
    size, kept, untrained = rows[0], kept_elements(spec, plan), Counter[int]()
    for replica in plan.replicas:
        if size_of := untrained_bytes(spec, replica):
            for rank in _pipeline_ranks(plan, replica.holders):
                untrained[rank] += size_of
    copies, staged = quantised_weights(plan), staged_bytes(spec, plan)
    checkpoint, saved = spec.train.checkpoint, (0,) * plan.mesh.pp
    if checkpoint is not None and checkpoint.background:  # they are written from a copy in the memory of the host
        saved = saved_bytes(spec, plan)
    return tuple(
        Memory(
            weights=kept.weights[rank] * size.weights + untrained[rank] + copies[rank],
            gradients=kept.gradients[rank] * size.gradients,
            optimizer=kept.owned[rank] * size.optimizer + kept.rest[rank] * rows[-1].optimizer,
            activations=0,
            host=kept.owned[rank] * size.host + kept.rest[rank] * rows[-1].host + staged[rank] + saved[rank],
        )
        for rank in range(plan.mesh.pp)
    )


def largest_parts(spec: Spec, plan: Plan) -> list[list[int]]:
    """By row of the optimizer, the most elements that move at a time between a device of each pipeline rank and its
    host: a part of what it owns of a bucket, or a whole parameter."""
    elements = {replica.key: replica.num_elements for replica in plan.replicas}
    most = [[0] * plan.mesh.pp for _ in spec.train.optimizer.rows]
    for bucket in plan.buckets:
        sizes = [elements[name] for name in bucket.replicas]
        owned, whole = -(-sum(sizes) // (len(bucket.holders) if spec.parallel.zero else 1)), is_whole(spec, bucket)
        of_row = most[bucket.rest]
        for rank in _pipeline_ranks(plan, bucket.holders):
            of_row[rank] = max(of_row[rank], max(sizes) if whole else min(owned, HOST_PART))
    return most


def staged_bytes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """Bytes of a host, for a device of each pipeline rank, through which master weights go to the moving average."""
    if not spec.has_hosts or spec.train.ema is None or "master" in spec.offload:
        return (0,) * plan.mesh.pp
    size = ITEMSIZE[spec.precision.master]
    return tuple(min(max(parts), HOST_PART) * size for parts in zip(*largest_parts(spec, plan), strict=True))


def saved_bytes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """Bytes of a checkpoint that a device of each pipeline rank, at most, answers for.

    Without ZeRO the first holder of a bucket saves it, with it each holder saves its part of the optimizer's state, and
    of weights that are not whole on the first one: master weights, or gathered ones (runtime/state/snapshot.py).
    """
    precision = spec.precision
    elements = {replica.key: replica.num_elements for replica in plan.replicas}
    of_weight, optimizer = ITEMSIZE[precision.master], spec.train.optimizer
    of_average = ITEMSIZE[average_dtype(precision)] if spec.train.ema else 0
    found = Counter[int]()  # by device
    for bucket in plan.buckets:
        holders, sizes = tuple(bucket.holders), [elements[name] for name in bucket.replicas]
        of_state = of_average + state_bytes(precision, optimizer.rows[bucket.rest])
        if not spec.parallel.zero or len(holders) == 1:
            found[holders[0]] += sum(sizes) * (of_weight + of_state)
            continue
        divided = precision.master != precision.parameter or (spec.parallel.zero == 3 and bool(bucket.sites))
        of_owned = of_state + of_weight * divided
        for owner, size in zip(bucket.owners, sizes, strict=False):
            found[holders[owner]] += size * of_owned
        for holder in holders if not bucket.owners else ():
            found[holder] += -(-sum(sizes) // len(holders)) * of_owned
        found[holders[0]] += 0 if divided else sum(sizes) * of_weight
    for replica in plan.replicas:
        if not plan.frozen:
            found[next(iter(replica.holders))] += untrained_bytes(spec, replica)
    most = [0] * plan.mesh.pp
    for device, size in found.items():
        rank, _ = plan.mesh.coordinates(device)
        most[rank] = max(most[rank], size)
    return tuple(most)


def untrained_bytes(spec: Spec, replica: Replica) -> int:
    """Bytes of a balancing bias or of a table; 0 of anything else."""
    size = {"bias": ITEMSIZE[spec.precision.gradients], "table": BYTES[TABLE_DTYPE]}
    return replica.num_elements * size.get(replica.role, 0)


def kept_elements(spec: Spec, plan: Plan) -> Elements:
    """What a device of each pipeline rank keeps of weights and gradients, and updates.

    Devices keep as much as data rank 0 does. They update as much too, but where owners have parameters whole.
    """
    elements = {replica.key: replica.num_elements for replica in plan.replicas}
    weights, gradients, owned, rest = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for bucket in plan.buckets:
        whole = is_whole(spec, bucket)
        owners = len(bucket.holders) if spec.parallel.zero and not whole else 1
        part = -(-sum(map(elements.__getitem__, bucket.replicas)) // owners)
        kept = part * owners // bucket.parts
        for rank in _pipeline_ranks(plan, bucket.holders):
            weights[rank] += kept if spec.parallel.zero == 3 else part * owners
            gradients[rank] += 0 if bucket.still else kept
            (rest if bucket.rest else owned)[rank] += part
    for bucket in plan.frozen:
        for rank in _pipeline_ranks(plan, bucket.holders):
            weights[rank] += sum(map(elements.__getitem__, bucket.replicas))
    if spec.train.optimizer.unit == "matrix" and spec.parallel.zero:
        owned = owned_at_most(plan, elements)
    return Elements(weights, gradients, owned, rest)


def is_whole(spec: Spec, bucket: Bucket) -> bool:
    """Whether owners have parameters of a bucket whole."""
    return spec.train.optimizer.unit == "matrix" and not bucket.rest


def owned_at_most(plan: Plan, amounts: Mapping[str, int]) -> Counter[int]:
    """By pipeline rank: the largest sum of the amounts of parameters that one of its devices owns whole."""
    by_device, most = Counter[int](), Counter[int]()
    for bucket in (bucket for bucket in plan.buckets if not bucket.rest):
        holders = tuple(bucket.holders)
        for name, owner in zip(bucket.replicas, bucket.owners or (0,) * len(bucket.replicas), strict=True):
            by_device[holders[owner]] += amounts[name]
    for device, amount in by_device.items():
        rank, _ = plan.mesh.coordinates(device)
        most[rank] = max(most[rank], amount)
    return most


def update_scratch(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """Bytes that the update of a parameter needs besides what a device holds, at most, by pipeline rank: for its
    products, and for the parts of offloaded state that are on the device, which are of one row at a time."""
    optimizer, itemsize = spec.train.optimizer, ITEMSIZE[spec.precision.compute]
    scratch: dict[tuple[object, ...], int] = {}
    slots = [HOST_SLOTS * offloaded_bytes(spec, row) for row in optimizer.rows]
    rooms = [[size * part for part in parts] for size, parts in zip(slots, largest_parts(spec, plan), strict=True)]
    most = [[0] * plan.mesh.pp for _ in optimizer.rows]
    for replica in plan.replicas:
        if replica.role == "parameter":
            shapes, row = replica.updated_shapes, optimizer.of(replica.matrices)
            if (shapes, type(row)) not in scratch:
                scratch[shapes, type(row)] = max(row.scratch_bytes(shape, itemsize) for shape in shapes)
            needed, of_row = scratch[shapes, type(row)], most[optimizer.is_rest(replica.matrices)]
            for rank in replica.holders.pipeline_ranks if needed else ():
                of_row[rank] = max(of_row[rank], needed)
    needs = [map(add, own, room) for own, room in zip(most, rooms, strict=True)]
    return tuple(map(max, zip(*needs, strict=True)))


def _pipeline_ranks(plan: Plan, holders: Collection[int]) -> list[int]:
    """The pipeline ranks whose data rank 0 is a holder."""
    return [rank for rank in range(plan.mesh.pp) if plan.mesh.rank(rank, 0) in holders]


def quantised_weights(plan: Plan) -> tuple[int, ...]:
    """Bytes of the eight-bit copies on a device of every pipeline rank: of each weight, its scales, both transposed."""
    result = []
    for rank in range(plan.mesh.pp):
        tensors: dict[str, int] = {}
        for stage in plan.stages_of(rank):
            for use in (step for step in plan.stages[stage].steps if isinstance(step, Use)):
                names = dict(use.params)
                tensors |= {names[each.param]: each.num_bytes for each in plan.cuts[use.site].quantised}
        result.append(sum(tensors.values()))
    return tuple(result)


def device_of(spec: Spec, plan: Plan, rank: int) -> Device:
    """The device of a pipeline rank: all its data ranks are on one kind."""
    left = plan.mesh.rank(rank, 0)
    for nodes, node in spec.cluster.parts:
        if left < nodes * node.devices:
            return node.device
        left -= nodes * node.devices
    raise AssertionError("the cluster has a device for every rank")


def proven_memories(spec: Spec, plan: Plan, certificates: Iterable[Certificate]) -> tuple[Memory, ...]:
    """Bytes of a device of every pipeline rank at its peak: in the fullest of the proven programs, or in the update."""
    peaks = [*(certificate.peak_bytes for certificate in certificates), update_scratch(spec, plan)]
    return tuple(
        replace(state, activations=max(peak[rank] for peak in peaks))
        for rank, state in enumerate(rank_states(spec, plan))
    )
