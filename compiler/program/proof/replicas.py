"""Fourth pass, over the plan: every rank that computes a part of a gradient holds the parameter and is in its bucket.

Each parameter has one bucket. A bucket names exactly the stages that use its parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from itertools import islice, takewhile

from compiler.ir import Param, Plan, Replica, Use
from compiler.ir.holders import Columns
from compiler.program.proof.certificate import ProofError
from runtime.contract.slices import tiling_problem


def check_holders(plan: Plan) -> None:
    """Raise ProofError unless every parameter is held by the ranks that use it, and is in one bucket of its holders."""
    stages, params = _stages(plan)
    uses = {tensor: _ranks_of(plan, used_by) for tensor, used_by in stages.items()}
    checked: set[Hashable] = set()  # experts of one rank share these facts, which are checked once
    for replica in plan.replicas:
        users, param = uses.get(replica.tensor, frozenset()), params.get(replica.tensor)
        every = plan.mesh.expert_group if param and param.stack else plan.mesh.tp if replica.slice else 1
        together = plan.mesh.etp if param and param.stack and not replica.slice else 1
        common = (replica.holders, users, every, together)
        if common not in checked:
            _check_holders(plan, replica, users, every, together)
            checked.add(common)
    _check_slices(plan, params)
    _check_buckets(plan, stages)
    _check_sharded_buckets(plan)


def _stages(plan: Plan) -> tuple[dict[str, frozenset[int]], dict[str, Param]]:
    """By tensor, the stages that use it, and its parameter in a segment."""
    stages: dict[str, set[int]] = {}
    params: dict[str, Param] = {}
    for stage in plan.stages:
        for use in stage.steps:
            if isinstance(use, Use):
                for local, tensor in use.params:
                    stages.setdefault(tensor, set()).add(stage.index)
                    params[tensor] = next(p for p in use.segment.params if p.name == local)
    return {tensor: frozenset(used_by) for tensor, used_by in stages.items()}, params


def _ranks_of(plan: Plan, stages: frozenset[int]) -> frozenset[int]:
    """The pipeline ranks that store any of the stages."""
    return frozenset(rank for rank in range(plan.mesh.pp) if not stages.isdisjoint(plan.stages_of(rank)))


def _check_holders(plan: Plan, replica: Replica, users: frozenset[int], every: int, together: int) -> None:
    """Check that all columns of every pipeline rank that uses the tensor hold it.

    An expert or a slice is held by `together` neighbouring columns in each group of `every` columns; `together` is 1
    unless those columns hold the slices of one expert.
    """
    width = plan.mesh.columns
    expected = Counter({rank: width // every * together for rank in users})
    holders = list(replica.holders)  # may be thousands: the next lines inline mesh.coordinates
    counts = Counter([holder // width for holder in holders])
    coordinates = {holder % width % every // together for holder in holders}
    if len({*holders}) < len(holders) or counts != expected or len(coordinates) > 1:
        raise ProofError(
            f"reduce {replica.key}: held by ranks {list(replica.holders)}, but used on pipeline ranks {sorted(users)}"
        )


def _check_slices(plan: Plan, params: Mapping[str, Param]) -> None:
    """Check that the slices of a parameter cover all of it, and that each column holds the slice its segments take.

    Neighbouring columns hold the slices in order, so the output of one product is the input of the next.
    """
    table: dict[str, list[Replica]] = defaultdict(list)
    for replica in plan.replicas:
        table[replica.name].append(replica)
    for name, rows in table.items():
        first = rows[0]
        if problem := tiling_problem(first.shape, [row.slice for row in rows]):
            raise ProofError(f"hold {name}: {problem}")
        split = params[first.tensor].split if first.tensor in params else None
        if split is None and first.slice is None:
            continue
        slices = {row.holders.columns.start: (row.slice, row.shape) for row in rows}
        start, ranks = min(slices), split.ranks if split else 0
        expected = {start + rank: (split.slice_of(rank), first.shape) for rank in range(ranks) if split}
        if len(slices) < len(rows) or slices != expected or start % ranks:
            raise ProofError(f"hold {name}: its slices are not those of the ranks that split it")


def _check_buckets(plan: Plan, stages: Mapping[str, frozenset[int]]) -> None:
    """Check that every shared parameter is in exactly one bucket, whose holders and stages equal its own."""
    buckets = [(name, bucket) for bucket in plan.buckets for name in bucket.replicas]
    counts = Counter(name for name, _ in buckets)
    replicas = {replica.key: replica for replica in plan.replicas}
    sorted_stages = {tensor: tuple(sorted(used_by)) for tensor, used_by in stages.items()}
    for replica in plan.replicas:
        is_shared = replica.role in ("parameter", "still") and len(replica.holders) > 1
        wanted = 1 if is_shared else counts[replica.key]
        if counts[replica.key] != min(wanted, 1):
            raise ProofError(f"reduce {replica.key}: it is in {counts[replica.key]} buckets")
    for name, bucket in buckets:
        member = replicas.get(name)
        if member is None or member.holders != bucket.holders:
            raise ProofError(f"reduce {name}: bucket {bucket.name} has other holders")
        if sorted_stages[member.tensor] != bucket.stages:
            raise ProofError(f"reduce {name}: bucket {bucket.name} has other stages")
        if bucket.is_still != (member.role == "still"):
            raise ProofError(f"reduce {name}: bucket {bucket.name} mixes trained and frozen parameters")


def _check_sharded_buckets(plan: Plan) -> None:
    """Check that a bucket is sharded if several columns hold it, and gathered by exactly the segments that read it.

    A gathered bucket is padded so that all holders have shards of one size.
    """
    readers: dict[str, set[str]] = defaultdict(set)
    for use in plan.uses:
        for _, tensor in use.params:
            readers[tensor].add(use.site)
    by_key = {replica.key: replica for replica in plan.replicas}
    sizes: dict[str, dict[Columns, int]] = defaultdict(dict)  # by site and columns, elements of buckets with padding
    tensors: dict[str, set[str]] = defaultdict(set)
    for bucket in plan.buckets:
        members, count = [by_key[name] for name in bucket.replicas], len(bucket.holders)
        in_copy = takewhile(lambda column: column < plan.mesh.shard_columns, bucket.holders.columns)
        wanted = plan.zero >= 2 and len([*islice(in_copy, 2)]) > 1 and not bucket.is_still
        if (
            bucket.copies != plan.mesh.copies
            or bool(bucket.sites) != wanted
            or any(wanted and readers[replica.tensor] != {*bucket.sites} for replica in members)
        ):
            raise ProofError(f"scatter {bucket.name}: bucket is sharded for segments {list(bucket.sites)}")
        for site in bucket.sites:
            padded = -(-sum(replica.num_elements for replica in members) // count) * count
            sizes[site][bucket.holders.columns] = sizes[site].get(bucket.holders.columns, 0) + padded
            tensors[site].update(replica.tensor for replica in members)
    if plan.sharded.keys() != sizes.keys():
        differing = sorted(plan.sharded.keys() ^ sizes.keys())
        raise ProofError(f"scatter: segments {differing} gather other tensors than the buckets say")
    for site, shards in plan.sharded.items():
        buffers = [shards.gradients, *([shards.weights] if shards.weights else [])]
        totals = {sum(size for columns, size in sizes[site].items() if group[0] in columns) for group in sizes[site]}
        shapes = {buffer.shape for buffer in buffers}
        if shards.tensors != tensors[site] or shapes != {(size,) for size in totals} or len(buffers) != plan.zero - 1:
            raise ProofError(f"scatter {site}: it gathers other tensors than its buckets hold")
