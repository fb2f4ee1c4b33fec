"""Compares the bits of replicated tensors between ranks, so that a flipped bit is found, with its rank and tensor.

Replicas are bit-identical, because sums of gradients are, and updates are functions of them. Each rank computes a
64-bit fingerprint of each tensor, and one small all-reduce distributes all fingerprints.

Weights and balancing biases are replicated; so are master weights, moments and moving averages, unless they are sharded
(`zero` ≥ 1). Then the next gather copies an owner's flipped bit to all ranks, and no comparison can find it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime import contract
from runtime.comm.transport import Sums
from runtime.state.state import BucketEntry, FlatBucket, State
from runtime.system.outcome import ReportedError

_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18  # elements, so that a chunk, its words and the factors fit into a core's cache
_FACTOR = -7046029254386353131  # 2^64 / golden ratio, an odd number, as int64
_MOST_NAMED = 6
_MOST_AT_ONCE = 1 << 13  # numbers in one sum over the world


class ReplicaError(ReportedError):
    """Replicated tensors differ. All ranks raise it after the same step."""

    def __init__(self, step: int, differences: Sequence[ReplicaDifference]) -> None:
        tail = f" and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
        texts = "; ".join(map(str, differences[:_MOST_NAMED]))
        super().__init__(f"step {step}: {texts}{tail}; no checkpoint has these bits: go on with dsc train --resume")
        self.ranks = sorted({rank for difference in differences for rank in difference.ranks})
        self.tensors = [difference.tensor for difference in differences]


@dataclass(frozen=True)
class ReplicaDifference:
    """A tensor in which `ranks` differ from the `other_ranks`, or, if there is no majority, from each other."""

    tensor: str
    ranks: tuple[int, ...]
    other_ranks: tuple[int, ...]

    def __str__(self) -> str:
        if not self.other_ranks:
            return f"ranks {ranks_text(self.ranks)} have different bits of {self.tensor}"
        verb = "ranks {} have" if len(self.ranks) > 1 else "rank {} has"
        noun = "ranks {}" if len(self.other_ranks) > 1 else "rank {}"
        other_ranks = noun.format(ranks_text(self.other_ranks))
        return f"{verb.format(ranks_text(self.ranks))} other bits of {self.tensor} than {other_ranks}"


@dataclass(frozen=True)
class _ReplicatedTensors:
    """Tensors of a bucket, or a balancing bias, that `ranks` have as replicas, by name."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]


def fingerprint(tensor: Tensor) -> Tensor:
    """Return 64 bits (int64 on the device) of a contiguous tensor that change if any single bit of it changes.

    They are the sum of words times odd factors, modulo 2^64. A flipped bit changes a word by ±2^k, k < 64, and an odd
    factor times that is not 0.
    """
    words = tensor.detach().view(-1).view(_INTS[tensor.element_size()])
    factors = _factors(min(_CHUNK, words.numel()), words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        total = total * _FACTOR + _mix(chunk, factors)
    return total


def _mix(words: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return the sum of words times odd factors, modulo 2^64."""
    factors = _factors(words.numel(), words.device) if factors is None else factors
    return (words * factors[: words.numel()]).sum()


def _factors(count: int, device: torch.device) -> Tensor:
    return (torch.arange(1, count + 1, dtype=torch.int64, device=device) * _FACTOR) | 1


def compare(state: State, plan: contract.RunPlan, rank: int, sums: Sums) -> list[ReplicaDifference]:
    """Return the replicated tensors that differ, equal on all ranks. All ranks call it. Empty if there are none."""
    table = [*_replicated_tensors(plan)]
    tensors = _held_tensors(state)
    mine = [_fingerprints(tensors, entry, rank, state.device) for entry in table]
    rows = _exchange([_mix(prints).view(1) for prints in mine], table, rank, sums)
    differing = [index for index, row in enumerate(rows) if len({*row.view(-1).tolist()}) > 1]
    if not differing:
        return []
    table, mine = [table[index] for index in differing], [mine[index] for index in differing]
    differences: list[ReplicaDifference] = []
    for entry, row in zip(table, _exchange(mine, table, rank, sums), strict=True):
        for name, values in zip(entry.names, row.T.tolist(), strict=True):
            differences += _difference(name, entry.ranks, values)
    return differences


def _replicated_tensors(plan: contract.RunPlan) -> Iterator[_ReplicatedTensors]:
    """Yield the replicated tensors, in the same order on all ranks."""
    average = ["moving average"] * (plan.train.ema is not None)
    master = ["master weights"] * (plan.precision.master != plan.precision.parameter)
    for index, bucket in enumerate((*plan.buckets, *plan.frozen)):
        state = [*(moment.name for moment in plan.optimizer.state_of(bucket)), *average]
        owned = not plan.zero and index < len(plan.buckets)
        kinds = ["weights", *(master * owned), *(state * owned)]
        names = tuple(f"{parameter.name} ({kind})" for kind in kinds for parameter in bucket.parameters)
        if plan.gathers(bucket):
            parts = dict.fromkeys(plan.peers(bucket, holder) for holder in bucket.holders)
            yield from (_ReplicatedTensors(ranks, (f"weights of {bucket.name}",)) for ranks in parts if len(ranks) > 1)
        elif len(bucket.holders) > 1:
            yield _ReplicatedTensors(bucket.holders, names)
    yield from (
        _ReplicatedTensors(tensor.holders, (tensor.name,)) for tensor in plan.untrained if len(tensor.holders) > 1
    )


def _fingerprints(tensors: Mapping[str, Tensor], alike: _ReplicatedTensors, rank: int, device: torch.device) -> Tensor:
    """Return the fingerprints of replicated tensors in the order of names; zeros if this rank does not have them."""
    if rank not in alike.ranks:
        return torch.zeros(len(alike.names), dtype=torch.int64, device=device)
    return torch.stack([fingerprint(tensors[name]).to(device) for name in alike.names])


def _held_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of a rank by the names of `_replicated_tensors`."""
    tensors = {**state.biases, **state.tables}
    for bucket in state.all_buckets:
        if bucket.is_gathered:
            tensors[f"weights of {bucket.name}"] = bucket.parameters
            continue
        for entry in bucket.entries:
            tensors[f"{entry.name} (weights)"] = bucket.parameters[entry.start : entry.end]
            if not bucket.shares:
                tensors |= {f"{entry.name} ({kind})": flat for kind, flat in _owned_tensors(bucket, entry)}
    return tensors


def _owned_tensors(bucket: FlatBucket, entry: BucketEntry) -> Iterator[tuple[str, Tensor]]:
    """Yield master weights, optimizer state and moving average of a parameter that the rank owns completely."""
    if (owned := bucket.owned_part(entry)) is None:
        return
    _, piece, part = owned
    kinds = {"master weights": piece.master, **piece.state}
    kinds |= {"moving average": piece.average} if piece.average is not None else {}
    yield from ((kind, flat[part]) for kind, flat in kinds.items())


def _exchange(mine: Sequence[Tensor], table: Sequence[_ReplicatedTensors], rank: int, sums: Sums) -> list[Tensor]:
    """All-gather the numbers of each row of the table: [ranks, numbers]. `mine`: the numbers of this rank."""
    rows = []
    for entry, values in zip(table, mine, strict=True):
        row = values.new_zeros(len(entry.ranks), values.numel())
        if rank in entry.ranks:
            row[entry.ranks.index(rank)] = values
        rows.append(row)
    if not rows:
        return []
    flat = torch.cat([row.view(-1) for row in rows])
    for part in flat.split(_MOST_AT_ONCE):
        sums.all_reduce(part)
    parts = flat.split([row.numel() for row in rows])
    return [part.view(row.shape) for part, row in zip(parts, rows, strict=True)]


def _difference(name: str, ranks: tuple[int, ...], values: Sequence[int]) -> Iterator[ReplicaDifference]:
    """Yield the ranks that differ in a tensor: those without the most frequent value, or all if it is not unique."""
    (value, count), *rarer = Counter(values).most_common()
    if not rarer:
        return
    if rarer[0][1] == count:
        yield ReplicaDifference(name, ranks, ())
        return
    alike = tuple(rank for rank, rank_value in zip(ranks, values, strict=True) if rank_value == value)
    yield ReplicaDifference(name, tuple(rank for rank in ranks if rank not in alike), alike)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return numbers as text: `0, 1 and 3`."""
    *first, last = map(str, ranks)
    return f"{', '.join(first)} and {last}" if first else last
