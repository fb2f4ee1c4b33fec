"""Fourth pass, over the plan: whoever computes a part of a gradient holds the parameter, and is in its one bucket.

A bucket names the stages that use its parameters, all of them and no others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping

from compiler.ir import Param, Plan, Replica, Use
from compiler.ir.holders import Columns
from compiler.program.proof.certificate import ProofError
from runtime.contract.slices import tiling_problem


def check_holders(plan: Plan) -> None:
    """Raise ProofError unless every parameter is held where it is used, and is in one bucket of its holders."""
    stages, params = _stages(plan)
    uses = {tensor: _ranks_of(plan, each) for tensor, each in stages.items()}
    right: set[Hashable] = set()  # what experts of one rank have in common is looked at once
    for replica in plan.replicas:
        users, param = uses.get(replica.tensor, frozenset()), params.get(replica.tensor)
        every = plan.mesh.expert_group if param and param.stack else plan.mesh.tp if replica.slice else 1
        together = plan.mesh.etp if param and param.stack and not replica.slice else 1
        common = (replica.holders, users, every, together)
        if common not in right:
            _check_holders(plan, replica, users, every, together)
            right.add(common)
    _check_slices(plan, params)
    _check_buckets(plan, stages)
    _check_divided(plan)


def _stages(plan: Plan) -> tuple[dict[str, frozenset[int]], dict[str, Param]]:
    """Tensor -> the stages that use it, and what a segment takes of it."""
    stages: dict[str, set[int]] = {}
    params: dict[str, Param] = {}
    for stage in plan.stages:
        for use in stage.steps:
            if isinstance(use, Use):
                for local, tensor in use.params:
                    stages.setdefault(tensor, set()).add(stage.index)
                    params[tensor] = next(p for p in use.segment.params if p.name == local)
    return {tensor: frozenset(each) for tensor, each in stages.items()}, params


def _ranks_of(plan: Plan, stages: frozenset[int]) -> frozenset[int]:
    """The pipeline ranks that store one of some stages."""
    return frozenset(rank for rank in range(plan.mesh.pp) if not stages.isdisjoint(plan.stages_of(rank)))


def _check_holders(plan: Plan, replica: Replica, users: frozenset[int], every: int, together: int) -> None:
    """All columns of every pipeline rank that uses the tensor; of an expert or a slice, one in each of its groups, or
    so many together: those that have the slices of an expert."""
    width = plan.mesh.columns
    expected = Counter({rank: width // every * together for rank in users})
    holders = list(replica.holders)  # of thousands of ranks: what follows is mesh.coordinates of each
    given = Counter([holder // width for holder in holders])
    coordinates = {holder % width % every // together for holder in holders}
    if len({*holders}) < len(holders) or given != expected or len(coordinates) > 1:
        raise ProofError(
            f"reduce {replica.key}: held by ranks {list(replica.holders)}, but used on pipeline ranks {sorted(users)}"
        )


def _check_slices(plan: Plan, params: Mapping[str, Param]) -> None:
    """The slices of a parameter are all of it. Neighbouring columns have them, each the one that segments take there:
    what one product gives is what the next one reads."""
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
        held = {row.holders.columns.start: (row.slice, row.shape) for row in rows}
        at, ranks = min(held), split.ranks if split else 0
        taken = {at + rank: (split.slice_of(rank), first.shape) for rank in range(ranks) if split}
        if len(held) < len(rows) or held != taken or at % ranks:
            raise ProofError(f"hold {name}: its slices are not those of the ranks that split it")


def _check_buckets(plan: Plan, stages: Mapping[str, frozenset[int]]) -> None:
    """Every trained parameter is in exactly one bucket, of holders and stages equal to its own, if it is shared."""
    buckets = [(name, bucket) for bucket in plan.buckets for name in bucket.replicas]
    counts = Counter(name for name, _ in buckets)
    replicas = {replica.key: replica for replica in plan.replicas}
    sorted_stages = {tensor: tuple(sorted(each)) for tensor, each in stages.items()}
    for replica in plan.replicas:
        held = replica.role in ("parameter", "still") and len(replica.holders) > 1
        wanted = 1 if held else counts[replica.key]
        if counts[replica.key] != min(wanted, 1):
            raise ProofError(f"reduce {replica.key}: it is in {counts[replica.key]} buckets")
    for name, bucket in buckets:
        found = replicas.get(name)
        if found is None or found.holders != bucket.holders:
            raise ProofError(f"reduce {name}: bucket {bucket.name} has other holders")
        if sorted_stages[found.tensor] != bucket.stages:
            raise ProofError(f"reduce {name}: bucket {bucket.name} is of other stages")
        if bucket.still != (found.role == "still"):
            raise ProofError(f"reduce {name}: bucket {bucket.name} has what is trained, and what is not")


def _check_divided(plan: Plan) -> None:
    """A bucket is divided if several ranks of a pipeline rank hold it. Every segment that reads it, and no other, puts
    it together, with the padding of equal parts for all holders."""
    readers: dict[str, set[str]] = defaultdict(set)
    for use in plan.uses:
        for _, tensor in use.params:
            readers[tensor].add(use.site)
    of = {replica.key: replica for replica in plan.replicas}
    sizes: dict[str, dict[Columns, int]] = defaultdict(dict)  # of the buckets of each site, by columns, with padding
    tensors: dict[str, set[str]] = defaultdict(set)
    for bucket in plan.buckets:
        members, count = [of[name] for name in bucket.replicas], len(bucket.holders)
        wanted = plan.zero >= 2 and len(bucket.holders.columns) > 1 and not bucket.still
        if bool(bucket.sites) != wanted or any(wanted and readers[each.tensor] != {*bucket.sites} for each in members):
            raise ProofError(f"scatter {bucket.name}: bucket is divided among segments {list(bucket.sites)}")
        for site in bucket.sites:
            padded = -(-sum(each.num_elements for each in members) // count) * count
            sizes[site][bucket.holders.columns] = sizes[site].get(bucket.holders.columns, 0) + padded
            tensors[site].update(each.tensor for each in members)
    if plan.sharded.keys() != sizes.keys():
        raise ProofError(f"scatter: segments {sorted(plan.sharded.keys() ^ sizes.keys())} put other tensors together")
    for site, here in plan.sharded.items():
        buffers = [here.gradients, *([here.weights] if here.weights else [])]
        held = {sum(size for columns, size in sizes[site].items() if each[0] in columns) for each in sizes[site]}
        shapes = {buffer.shape for buffer in buffers}
        if here.tensors != tensors[site] or shapes != {(size,) for size in held} or len(buffers) != plan.zero - 1:
            raise ProofError(f"scatter {site}: it puts other tensors together than its buckets have")
