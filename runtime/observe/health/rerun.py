"""Recomputes a step with bad numbers from the same weights and samples, before anything else happens.

Losses, norms and gradients are deterministic. If they differ, a device made an error, and the second result is used; if
not, the weights and samples are the cause. Megatron-LM's rerun state machine does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.observe.health.replicas import fingerprint, ranks_text
from runtime.state.state import State


class RerunRank(NamedTuple):
    """A rank, the world size, and the sums by which ranks exchange results."""

    rank: int
    world: int
    sums: Sums


class RerunStep(NamedTuple):
    """A recomputed step: its sums over all ranks, a fingerprint of each rank's losses, loads and gradients, and the
    fault if they differ from the first time."""

    sums: dict[str, Tensor]
    prints: tuple[int, ...]
    fault: Fault | None


@dataclass(frozen=True)
class Fault:
    """A step whose recomputation gave other bits: on which ranks, and what differed."""

    step: int
    ranks: tuple[int, ...]
    reason: str


def recompute_step(
    step: int,
    sums: Mapping[str, Tensor],
    compute: Callable[[], dict[str, Tensor]],
    records: Callable[[], Tensor],
    state: State,
    place: RerunRank,
) -> RerunStep:
    """Recompute a step with `compute`. `sums`: the sums over all ranks of the first time.

    Every rank calls it. `records`: returns the rank's terms of the sums for the last computation; its gradients are in
    `state`.
    """
    before = _prints(records(), state)
    repeated = compute()
    table = torch.zeros(place.world, 4, dtype=torch.int64, device=state.device)
    table[place.rank] = torch.cat([before, _prints(records(), state)])
    place.sums.all_reduce(table)
    rows = table.tolist()
    other_records, other_gradients = ([rank for rank, row in enumerate(rows) if row[n] != row[n + 2]] for n in (0, 1))
    prints = tuple(_combine(*row[2:]) for row in rows)
    if not other_records and not other_gradients and all(_are_same(sums[name], repeated[name]) for name in sums):
        return RerunStep(repeated, prints, None)
    numbers, ranks = ("losses or loads", other_records) if other_records else ("gradients", other_gradients)
    return RerunStep(repeated, prints, Fault(step, tuple(ranks), _reason(numbers, ranks)))


def print_of(records: Tensor, state: State) -> int:
    """Return a fingerprint of the losses, loads and gradients of a rank in the last computed step."""
    return _combine(*_prints(records, state).tolist())


def _prints(records: Tensor, state: State) -> Tensor:
    """Return fingerprints of the records of a rank and of its gradients. All NaNs count as equal."""
    gradients = torch.stack([fingerprint(bucket.gradients) for bucket in state.buckets])
    return torch.stack([fingerprint(torch.where(records.isnan(), math.nan, records)), fingerprint(gradients)])


def _combine(of_records: int, of_gradients: int) -> int:
    """Combine two fingerprints into one of 64 bits."""
    return (of_records * 3 + of_gradients * 5) & (1 << 64) - 1


def _are_same(first: Tensor, second: Tensor) -> bool:
    return bool(((first == second) | ((first != first) & (second != second))).all())


def _reason(numbers: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return "sums over all ranks had other bits when the step was computed again"
    subject = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"
    return f"{subject} had other {numbers} when the step was computed again"
