"""Fourth pass, over the plan: whoever computes a part of a gradient holds the parameter, and is in its one bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from compiler.ir import Plan, Replica, Use
from compiler.proof.certificate import ProofError


def check_holders(plan: Plan) -> None:
    """Raise ProofError unless every parameter is held where it is used, and is in one bucket of its holders."""
    uses = _pipeline_ranks(plan)
    right: set[Hashable] = set()  # what experts of one rank have in common is looked at once
    for replica in plan.replicas:
        users, stack = uses.get(replica.tensor, (frozenset(), 0))
        common = (replica.holders, users, stack)
        if common not in right:
            _check_holders(plan, replica, users, stack)
            right.add(common)
    _check_buckets(plan)


def _pipeline_ranks(plan: Plan) -> dict[str, tuple[frozenset[int], int]]:
    """Tensor -> (pipeline ranks that store a stage which uses it, how many experts are stacked in it)."""
    users: dict[str, set[int]] = {}
    stacks: dict[str, int] = {}
    for rank in range(plan.mesh.pp):
        for stage in plan.stages_of(rank):
            for use in plan.stages[stage].steps:
                if isinstance(use, Use):
                    for local, tensor in use.params:
                        users.setdefault(tensor, set()).add(rank)
                        stacks[tensor] = next(p.stack for p in use.segment.params if p.name == local)
    return {tensor: (frozenset(ranks), stacks[tensor]) for tensor, ranks in users.items()}


def _check_holders(plan: Plan, replica: Replica, users: frozenset[int], stack: int) -> None:
    """All data ranks of every pipeline rank that uses the tensor; of an expert, one in each expert group."""
    mesh = plan.mesh
    expected = Counter({rank: mesh.dp // mesh.ep if stack else mesh.dp for rank in users})
    given = Counter(mesh.coordinates(holder)[0] for holder in replica.holders)
    coordinates = {mesh.coordinates(holder)[1] % mesh.ep for holder in replica.holders}
    if len(set(replica.holders)) < len(replica.holders) or given != expected or (stack and len(coordinates) > 1):
        raise ProofError(
            f"reduce {replica.name}: held by ranks {list(replica.holders)}, but used on pipeline ranks {sorted(users)}"
        )


def _check_buckets(plan: Plan) -> None:
    """Every trained parameter is in exactly one bucket, among holders equal to its own, if there are several."""
    buckets = [(name, bucket) for bucket in plan.buckets for name in bucket.replicas]
    counts = Counter(name for name, _ in buckets)
    holders = {replica.name: replica.holders for replica in plan.replicas}
    for replica in plan.replicas:
        wanted = 1 if replica.role == "parameter" and len(replica.holders) > 1 else counts[replica.name]
        if counts[replica.name] != min(wanted, 1):
            raise ProofError(f"reduce {replica.name}: it is in {counts[replica.name]} buckets")
    for name, bucket in buckets:
        if holders.get(name) != bucket.holders:
            raise ProofError(f"reduce {name}: bucket {bucket.name} has other holders")
