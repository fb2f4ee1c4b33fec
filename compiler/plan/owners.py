"""Which rank owns the optimizer state of a parameter, where owners have parameters whole (ZeRO-1, arXiv 1910.02054).

An optimizer that multiplies matrices, as Muon does, updates a parameter only where all of it is. So the holders of a
bucket share it out by parameters; elsewhere they cut it into equal parts, and nobody has to be chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from compiler.ir import Bucket, Replica
from dsl.schema import Optimizer


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
