"""A step whose numbers are wrong, computed again from the same weights and samples before anything follows.

Losses, norms and gradients have the same bits each time. Where they have not, a device erred, and the second result
holds; where they have, they are those of the weights and the samples. Megatron-LM's rerun state machine does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.comm.transport import Sums
from runtime.health.replicas import fingerprint, listed
from runtime.state import State


class Place(NamedTuple):
    """A rank among those of its world, and by which sums they tell each other."""

    rank: int
    world: int
    sums: Sums


@dataclass(frozen=True)
class Fault:
    """A step that had other bits when it was computed again: on which ranks, and what differed."""

    step: int
    ranks: tuple[int, ...]
    reason: str


def computed_again(
    step: int,
    sums: Mapping[str, Tensor],
    compute: Callable[[], dict[str, Tensor]],
    records: Callable[[], Tensor],
    state: State,
    place: Place,
) -> tuple[dict[str, Tensor], Fault | None]:
    """The sums of a step over all ranks, computed again by `compute`, and the fault if they differ.

    Every rank calls it. `records`: what a rank adds to the sums, of the step that was computed last; its gradients are
    in `state`.
    """
    before = records(), _gradients(state)
    again = compute()
    flags = torch.zeros(2, place.world, dtype=torch.int64, device=state.device)
    for row, was, now in zip(flags, before, (records(), _gradients(state)), strict=True):
        row[place.rank] = not _same(was, now)
    place.sums.all_reduce(flags)
    other_records, other_gradients = ([at for at, differs in enumerate(row) if differs] for row in flags.tolist())
    if not other_records and not other_gradients and all(_same(sums[name], again[name]) for name in sums):
        return again, None
    what, ranks = ("losses or loads", other_records) if other_records else ("gradients", other_gradients)
    return again, Fault(step, tuple(ranks), _reason(what, ranks))


def _gradients(state: State) -> Tensor:
    """Fingerprints of the gradients that a rank keeps."""
    return torch.stack([fingerprint(bucket.gradients) for bucket in state.buckets])


def _same(was: Tensor, now: Tensor) -> bool:
    return bool(((was == now) | ((was != was) & (now != now))).all())


def _reason(what: str, ranks: Sequence[int]) -> str:
    if not ranks:
        return "sums over all ranks had other bits when the step was computed again"
    of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"
    return f"{of} had other {what} when the step was computed again"
