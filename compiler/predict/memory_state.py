"""The memory that a device of each pipeline rank always holds: weights, gradients, and its part of optimizer state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from math import lcm
from operator import add
from statistics import fmean
from typing import NamedTuple

from compiler.ir import Bucket, Plan, Replica, Use
from compiler.ir.dtypes import ITEMSIZE as BYTES
from compiler.ir.holders import Holders
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
    kept_under_zero,
    offloaded_bytes,
    state_bytes,
)
from dsl.schema import Device, Spec

# --- A lower bound of the memory that the fullest device lacks, for any split of layers over stages
#
# Ranks that store the same stages form a cell. The fullest device of a cell holds at least the mean of its ranks, each
# at some moment of its schedule, and a layer adds at least as much to that mean as in the stage where it adds least.
# Layers of one kind, with those that add no less in any cell, are therefore assigned one by one to the cell that then
# holds least. The fullest cell at the end is a bound for every split.


def missing_with(holding: Holding, placement: StagePlacement, runs: Runs) -> tuple[int, int]:
    """A lower bound of the bytes that the fullest device lacks with these layers on each stage, and its pipeline rank.

    The bound is below 0 if everything may fit.
    """
    num_ranks, last = len(holding.room), len(runs) - 1
    blocks: list[list[Bytes]] = [[*holding.layers[begin:end]] for begin, end in runs]
    blocks[0].append(holding.first)
    blocks[last].append(holding.last)
    totals: list[Bytes] = [
        (sum(a for a, _, _ in layers), sum(f for _, f, _ in layers), sum(i for *_, i in layers)) for layers in blocks
    ]
    missing = []
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        peak = max(
            sum(held_by(often, totals[s]) for s, often in zip(stages, moment, strict=True)) for moment in moments
        )
        missing.append((peak - _shared_bytes(holding, stages, last) - holding.room[rank], rank))
    return max(missing, key=lambda row: (row[0], -row[1]))


def missing_anywhere(holding: Holding, placement: StagePlacement) -> int:
    """A lower bound of the bytes that the fullest device lacks for any split of the layers; below 0 if all may fit."""
    kinds = Counter(holding.layers)
    cells = _cells(holding, placement, kinds)
    return int(max(_fullest(cells, kind, kinds) for kind in kinds)) - max(holding.room)


def _shared_bytes(holding: Holding, stages: Sequence[int], last: int) -> int:
    """Bytes that a rank with both the first and the last stage holds only once."""
    return holding.shared if {0, last} <= {*stages} else 0


@dataclass(frozen=True)
class _CellBytes:
    """Lower bounds of the bytes on the fullest device of a cell."""

    empty: float  # without the layers that may be in any cell
    adds: Mapping[Bytes, float]  # what a layer of each kind adds


def _fullest(cells: Sequence[_CellBytes], kind: Bytes, kinds: Mapping[Bytes, int]) -> float:
    """Bytes of the fullest cell after the layers of a kind, and those that add no less in any cell, are assigned."""
    count = sum(n for other_kind, n in kinds.items() if all(cell.adds[other_kind] >= cell.adds[kind] for cell in cells))
    waiting = [(cell.empty + cell.adds[kind], cell.adds[kind]) for cell in cells]
    fullest = max(cell.empty for cell in cells)
    heapify(waiting)
    for _ in range(count):
        total, adds = waiting[0]
        fullest = max(fullest, total)
        heapreplace(waiting, (total + adds, adds))
    return fullest


def _cells(holding: Holding, placement: StagePlacement, kinds: Mapping[Bytes, int]) -> list[_CellBytes]:
    """The cells of a pipeline. Each rank counts at the moment at which it would hold most of all layers."""
    num_ranks = len(holding.room)
    last = placement.num_stages(num_ranks) - 1
    cells: dict[tuple[int, ...], list[tuple[int, Moment]]] = defaultdict(list)
    for rank, moments in enumerate(holding.moments):
        stages = placement.stages_of(num_ranks, rank)
        fullest = max(
            moments, key=lambda moment: sum(n * held_by(often, kind) for often in moment for kind, n in kinds.items())
        )
        empty = max(holding.room) - holding.room[rank] - _shared_bytes(holding, stages, last)
        for stage, often in zip(stages, fullest, strict=True):
            empty += held_by(often, holding.first) if stage == 0 else 0
            empty += held_by(often, holding.last) if stage == last else 0
        cells[stages].append((empty, fullest))
    return [_cell(stages, moments, kinds, last) for stages, moments in cells.items()]


def _cell(
    stages: Sequence[int], moments: Sequence[tuple[int, Moment]], kinds: Iterable[Bytes], last: int
) -> _CellBytes:
    """The mean of the ranks of a cell, each at its moment. Every stage but the first and the last has a layer."""
    empty = fmean(size for size, _ in moments)
    mean_bytes = {
        kind: [fmean(held_by(moment[run], kind) for _, moment in moments) for run in range(len(stages))]
        for kind in kinds
    }
    for run, stage in enumerate(stages):
        if stage not in (0, last):
            empty += min(mean[run] - min(mean) for mean in mean_bytes.values())
    return _CellBytes(empty, {kind: min(mean) for kind, mean in mean_bytes.items()})


# --- memory state


class Elements(NamedTuple):
    """Elements of parameters by pipeline rank, with padding: those that a device keeps, and those that it updates."""

    weights: Counter[int]
    gradients: Counter[int]
    owned: Counter[int]  # that the first row of the optimizer updates, at most
    owned_by_rest: Counter[int]  # that its last row updates


def rank_states(spec: Spec, plan: Plan) -> tuple[DeviceBytes, ...]:
    """Bytes on the fullest device of each pipeline rank, without activations.

    Parameters with the same holders lie in one flat buffer. With ZeRO, the buffer is padded to equal parts and each
    holder updates one (arXiv 1910.02054), or each parameter has one owner (compiler/plan/sharding.py). Of sharded
    buckets, a device keeps only its shard (`Bucket.parts`): of gradients with zero = 2, and also of weights with
    zero = 3. Balancing biases have the dtype of gradients, and tables have four bytes per element. Weights of FP8
    products are held twice more, in FP8.
    """
    rows = [bytes_per_element(spec, row) for row in spec.train.optimizer.rows]
    size, elements, untrained = rows[0], kept_elements(spec, plan), Counter[int]()
    for replica in plan.replicas:
        if size_of := untrained_bytes(spec, replica):
            for rank in _pipeline_ranks(replica.holders):
                untrained[rank] += size_of
    copies, staged = quantised_weight_bytes(plan), staged_bytes(spec, plan)
    checkpoint, saved = spec.train.checkpoint, (0,) * plan.mesh.pp
    if checkpoint is not None and checkpoint.background:  # written from a copy in host memory
        saved = saved_bytes(spec, plan)
    return tuple(
        DeviceBytes(
            weights=elements.weights[rank] * size.weights + untrained[rank] + copies[rank],
            gradients=elements.gradients[rank] * size.gradients,
            optimizer=elements.owned[rank] * size.optimizer + elements.owned_by_rest[rank] * rows[-1].optimizer,
            activations=0,
            host=elements.owned[rank] * size.host
            + elements.owned_by_rest[rank] * rows[-1].host
            + staged[rank]
            + saved[rank],
        )
        for rank in range(plan.mesh.pp)
    )


def largest_parts(spec: Spec, plan: Plan) -> list[list[int]]:
    """By row of the optimizer and pipeline rank, the most elements that move at once between a device and its host.

    A move is a part of the elements that the device owns in a bucket, or a whole parameter.
    """
    elements = plan.elements
    largest = [[0] * plan.mesh.pp for _ in spec.train.optimizer.rows]
    for bucket in plan.buckets:
        sizes = [elements[name] for name in bucket.replicas]
        owned, undivided = -(-sum(sizes) // (len(bucket.holders) if spec.parallel.zero else 1)), is_whole(spec, bucket)
        of_row = largest[bucket.is_of_rest]
        for rank in _pipeline_ranks(bucket.holders):
            of_row[rank] = max(of_row[rank], max(sizes) if undivided else min(owned, HOST_PART))
    return largest


def staged_bytes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """Bytes of host memory per device of each pipeline rank that stage master weights for the moving average."""
    if not spec.has_hosts or spec.train.ema is None or "master" in spec.offload:
        return (0,) * plan.mesh.pp
    size = ITEMSIZE[spec.precision.master]
    return tuple(min(max(parts), HOST_PART) * size for parts in zip(*largest_parts(spec, plan), strict=True))


def saved_bytes(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """The most bytes of a checkpoint that a device of each pipeline rank saves.

    Without ZeRO, the first holder of a bucket saves it. With ZeRO, each holder saves its part of the optimizer state,
    and of weights that the first holder does not have in full: master weights, or sharded ones
    (runtime/state/snapshot.py).
    """
    precision = spec.precision
    of_weight, optimizer = ITEMSIZE[precision.master], spec.train.optimizer
    of_average = ITEMSIZE[average_dtype(precision)] if spec.train.ema else 0
    saved = Counter[int]()  # by device
    by_each = Counter[Holders]()  # what each of these holders saves of the buckets that they divide evenly
    for bucket in plan.buckets:
        holders, whole = bucket.holders, plan.bucket_elements[bucket.name]
        of_state = of_average + state_bytes(precision, optimizer.rows[bucket.is_of_rest])
        if not spec.parallel.zero or len(holders) == 1:
            saved[holders[0]] += whole * (of_weight + of_state)
            continue
        divided = precision.master != precision.parameter or (spec.parallel.zero == 3 and bool(bucket.sites))
        of_owned = of_state + of_weight * divided
        for name, owner in zip(bucket.replicas, bucket.owners, strict=False):
            saved[holders[owner]] += plan.elements[name] * of_owned
        if not bucket.owners:
            by_each[holders] += -(-whole // len(holders)) * of_owned
        saved[holders[0]] += 0 if divided else whole * of_weight
    for replica in plan.replicas if not plan.frozen else ():
        if size := untrained_bytes(spec, replica):
            saved[replica.holders[0]] += size
    # Holders are in every n-th column, so those of the first columns stand for all: thousands of devices save alike.
    period = lcm(*(group.period for group in by_each))
    shared = Counter[tuple[int, int]]()  # by pipeline rank and column
    for group, size in by_each.items():
        for device in group.of_first_copy(plan.mesh.columns // period):
            shared[plan.mesh.coordinates(device)] += size
    largest = [0] * plan.mesh.pp
    for (rank, _), size in shared.items():
        largest[rank] = max(largest[rank], size)
    for device, size in saved.items():
        rank, column = plan.mesh.coordinates(device)
        largest[rank] = max(largest[rank], size + shared[rank, column % period])
    return tuple(largest)


def untrained_bytes(spec: Spec, replica: Replica) -> int:
    """Bytes of a balancing bias or a table; 0 for anything else."""
    if replica.role not in ("bias", "table"):
        return 0
    return replica.num_elements * (
        BYTES[TABLE_DTYPE] if replica.role == "table" else ITEMSIZE[spec.precision.gradients]
    )


def kept_elements(spec: Spec, plan: Plan) -> Elements:
    """The elements of weights and gradients that a device of each pipeline rank keeps, and those that it updates.

    All data ranks keep as much as data rank 0. They also update as much, unless each parameter has one owner.
    """
    weights, gradients, owned, owned_of_rest = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for bucket in plan.buckets:
        undivided = is_whole(spec, bucket)
        owners = len(bucket.holders) if spec.parallel.zero and not undivided else 1
        part = -(-plan.bucket_elements[bucket.name] // owners)
        share = kept_under_zero(spec.parallel.zero, part * owners, part * owners // bucket.parts, part)
        for rank in _pipeline_ranks(bucket.holders):
            weights[rank] += share.weights
            gradients[rank] += 0 if bucket.is_still else share.gradients
            (owned_of_rest if bucket.is_of_rest else owned)[rank] += share.optimizer
    for bucket in plan.frozen:
        for rank in _pipeline_ranks(bucket.holders):
            weights[rank] += plan.bucket_elements[bucket.name]
    if spec.train.optimizer.unit == "matrix" and spec.parallel.zero:
        owned = max_owned_amounts(plan, plan.elements)
    return Elements(weights, gradients, owned, owned_of_rest)


def is_whole(spec: Spec, bucket: Bucket) -> bool:
    """Whether each parameter of a bucket has one owner, which updates all of it."""
    return spec.train.optimizer.unit == "matrix" and not bucket.is_of_rest


def max_owned_amounts(plan: Plan, amounts: Mapping[str, int]) -> Counter[int]:
    """By pipeline rank, the largest sum of amounts over the parameters that one of its devices owns."""
    by_device, largest = Counter[int](), Counter[int]()
    for bucket in (bucket for bucket in plan.buckets if not bucket.is_of_rest):
        holders = tuple(bucket.holders)
        for name, owner in zip(bucket.replicas, bucket.owners or (0,) * len(bucket.replicas), strict=True):
            by_device[holders[owner]] += amounts[name]
    for device, amount in by_device.items():
        rank = plan.mesh.coordinates(device).pp_rank
        largest[rank] = max(largest[rank], amount)
    return largest


def update_scratch(spec: Spec, plan: Plan) -> tuple[int, ...]:
    """By pipeline rank, the most bytes that the update of a parameter needs besides the state that a device holds.

    They are for the products of the update, and for parts of offloaded state, which are moved for one row of the
    optimizer at a time.
    """
    optimizer, itemsize = spec.train.optimizer, ITEMSIZE[spec.precision.compute]
    scratch: dict[tuple[object, ...], int] = {}
    slots = [HOST_SLOTS * offloaded_bytes(spec, row) for row in optimizer.rows]
    rooms = [[size * part for part in parts] for size, parts in zip(slots, largest_parts(spec, plan), strict=True)]
    scratch_of_rows = [[0] * plan.mesh.pp for _ in optimizer.rows]
    for replica, _ in plan.alike:
        if replica.role == "parameter":
            shapes, row = replica.updated_shapes, optimizer.row_of(replica.matrices)
            if (shapes, type(row)) not in scratch:
                scratch[shapes, type(row)] = max(row.scratch_bytes(shape, itemsize) for shape in shapes)
            needed, of_row = scratch[shapes, type(row)], scratch_of_rows[optimizer.is_rest(replica.matrices)]
            for rank in replica.holders.pipeline_ranks if needed else ():
                of_row[rank] = max(of_row[rank], needed)
    needs = [map(add, scratch_of_row, room) for scratch_of_row, room in zip(scratch_of_rows, rooms, strict=True)]
    return tuple(map(max, zip(*needs, strict=True)))


def _pipeline_ranks(holders: Holders) -> tuple[int, ...]:
    """The pipeline ranks on which data rank 0 is a holder."""
    return holders.pipeline_ranks if 0 in holders.columns else ()


def quantised_weight_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of FP8 copies on a device of each pipeline rank: of each weight with its scales, as is and transposed."""
    result = []
    for rank in range(plan.mesh.pp):
        tensors: dict[str, int] = {}
        for stage in plan.stages_of(rank):
            for use in (step for step in plan.stages[stage].steps if isinstance(step, Use)):
                names = dict(use.params)
                tensors |= {names[weight.param]: weight.num_bytes for weight in plan.cuts[use.site].quantised}
        result.append(sum(tensors.values()))
    return tuple(result)


def device_of(spec: Spec, plan: Plan, rank: int) -> Device:
    """The device of a pipeline rank, whose data ranks are all on one kind."""
    index = plan.mesh.rank(rank, 0)
    for nodes, node in spec.cluster.parts:
        if index < nodes * node.devices:
            return node.device
        index -= nodes * node.devices
    raise AssertionError("the cluster has a device for every rank")


def proven_memories(spec: Spec, plan: Plan, certificates: Iterable[ProofFacts]) -> tuple[DeviceBytes, ...]:
    """Peak bytes on a device of each pipeline rank: the highest of the proven programs and the update."""
    peaks = [*(certificate.peak_bytes for certificate in certificates), update_scratch(spec, plan)]
    return tuple(
        replace(state, activations=max(peak[rank] for peak in peaks))
        for rank, state in enumerate(rank_states(spec, plan))
    )
