"""What a device of each pipeline rank holds all the time: weights, gradients, and its part of the optimizer's state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from operator import add
from statistics import fmean
from typing import NamedTuple

from compiler.ir import Bucket, Plan, Replica, Use
from compiler.ir.dtypes import ITEMSIZE as BYTES
from compiler.ir.stage_placement import StagePlacement
from compiler.model.layers.moe import TABLE_DTYPE
from compiler.plan.layer_runs import Bytes, Holding, Moment, Runs, held_by
from compiler.program.proof import ProofFacts
from dsl.closed_forms.memory import (
    HOST_PART,
    HOST_SLOTS,
    ITEMSIZE,
    DeviceBytes,
    average_dtype,
    bytes_per_element,
    offloaded_bytes,
    state_bytes,
)
from dsl.schema import Device, Spec

# --- What the fullest device lacks at least, however layers are split over stages: known before they are
#
# Ranks that store the same stages are a cell. The fullest device of a cell holds no less than the mean of its ranks,
# each at a moment of its own, and a layer adds no less to that mean than in the stage where it adds least. So layers of
# one kind, and those that nowhere add less, are given one after the other to the cell that then holds least: what the
# fullest cell has in the end, it has on any split.


def missing_with(holding: Holding, placement: StagePlacement, runs: Runs) -> tuple[int, int]:
    """The most bytes that the device of a pipeline rank lacks at least with these layers on each stage, and the rank;
    below 0 where all may fit."""
    num_ranks, last = len(holding.room), len(runs) - 1
    blocks: list[list[Bytes]] = [[*holding.layers[begin:end]] for begin, end in runs]
    blocks[0].append(holding.first)
    blocks[last].append(holding.last)
    totals: list[Bytes] = [
        (sum(a for a, _, _ in each), sum(f for _, f, _ in each), sum(i for *_, i in each)) for each in blocks
    ]
    missing = []
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        most = max(sum(held_by(often, totals[s]) for s, often in zip(stages, each, strict=True)) for each in moments)
        missing.append((most - _shared(holding, stages, last) - holding.room[rank], rank))
    return max(missing, key=lambda each: (each[0], -each[1]))


def missing_anywhere(holding: Holding, placement: StagePlacement) -> int:
    """Bytes that the fullest device lacks at least on any split of the layers; below 0 where all may fit."""
    kinds = Counter(holding.layers)
    cells = _cells(holding, placement, kinds)
    return int(max(_fullest(cells, kind, kinds) for kind in kinds)) - max(holding.room)


def _shared(holding: Holding, stages: Sequence[int], last: int) -> int:
    """What a rank that has both ends holds once and not twice."""
    return holding.shared if {0, last} <= {*stages} else 0


@dataclass(frozen=True)
class _CellBytes:
    """Bytes of the fullest device of a cell at least: without layers that may be anywhere, and what each adds."""

    empty: float
    adds: Mapping[Bytes, float]


def _fullest(cells: Sequence[_CellBytes], kind: Bytes, kinds: Mapping[Bytes, int]) -> float:
    """What the fullest cell has in the end, of layers of a kind and of those that nowhere add less."""
    count = sum(n for other, n in kinds.items() if all(cell.adds[other] >= cell.adds[kind] for cell in cells))
    waiting = [(cell.empty + cell.adds[kind], cell.adds[kind]) for cell in cells]
    most = max(cell.empty for cell in cells)
    heapify(waiting)
    for _ in range(count):
        held, adds = waiting[0]
        most = max(most, held)
        heapreplace(waiting, (held + adds, adds))
    return most


def _cells(holding: Holding, placement: StagePlacement, kinds: Mapping[Bytes, int]) -> list[_CellBytes]:
    """The cells of a pipeline. Of the moments of a rank, those count at which it holds most of all its stages."""
    num_ranks = len(holding.room)
    last = placement.num_stages(num_ranks) - 1
    found: dict[tuple[int, ...], list[tuple[int, Moment]]] = defaultdict(list)
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        fullest = max(
            moments, key=lambda each: sum(n * held_by(often, kind) for often in each for kind, n in kinds.items())
        )
        held = max(holding.room) - holding.room[rank] - _shared(holding, stages, last)
        for stage, often in zip(stages, fullest, strict=True):
            held += held_by(often, holding.first) if stage == 0 else 0
            held += held_by(often, holding.last) if stage == last else 0
        found[stages].append((held, fullest))
    return [_cell(stages, moments, kinds, last) for stages, moments in found.items()]


def _cell(
    stages: Sequence[int], moments: Sequence[tuple[int, Moment]], kinds: Iterable[Bytes], last: int
) -> _CellBytes:
    """The mean of the ranks of a cell, each at its moment. Every stage but the two outer ones has a layer."""
    held = fmean(each for each, _ in moments)
    means = {
        kind: [fmean(held_by(moment[run], kind) for _, moment in moments) for run in range(len(stages))]
        for kind in kinds
    }
    for run, stage in enumerate(stages):
        if stage not in (0, last):
            held += min(mean[run] - min(mean) for mean in means.values())
    return _CellBytes(held, {kind: min(mean) for kind, mean in means.items()})


# --- memory state


class Elements(NamedTuple):
    """Elements of parameters, with padding: of those that devices keep, and of those that they update at most."""

    weights: Counter[int]  # by pipeline rank
    gradients: Counter[int]
    owned: Counter[int]
    rest: Counter[int]  # that the last of the rows of the optimizer updates


def rank_states(spec: Spec, plan: Plan) -> tuple[DeviceBytes, ...]:
    """Bytes of the fullest device of every pipeline rank; activations are left at 0.

    Parameters with the same holders lie in one flat buffer. With ZeRO it is padded to equal parts, of which each holder
    updates one (arXiv 1910.02054), or owners have parameters whole (compiler/plan/sharding.py); of buckets that
    segments put together, it keeps the parts of those that it divides them with (`Bucket.parts`), of gradients
    (zero = 2) and of weights (zero = 3). The balancing biases have the dtype of gradients, tables four bytes an
    element. Weights that products read in eight bits are held so twice more.
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
        DeviceBytes(
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


def proven_memories(spec: Spec, plan: Plan, certificates: Iterable[ProofFacts]) -> tuple[DeviceBytes, ...]:
    """Bytes of a device of every pipeline rank at its peak: in the fullest of the proven programs, or in the update."""
    peaks = [*(certificate.peak_bytes for certificate in certificates), update_scratch(spec, plan)]
    return tuple(
        replace(state, activations=max(peak[rank] for peak in peaks))
        for rank, state in enumerate(rank_states(spec, plan))
    )
