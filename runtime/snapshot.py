"""A rank's state as logical tensors, and back: what a checkpoint holds, whatever the plan.

Names: `weight/<parameter>`, `moment1/<parameter>`, `moment2/<parameter>`, `bias/<router bias>`. Of replicas the first
holder answers for a weight; with sharded optimizer state each holder answers for its part of the moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from runtime.checkpoint import Part
from runtime.optimizer import sharded
from runtime.state import Bucket, Entry, State

MOMENTS = ("moment1", "moment2")
Read = Callable[[Iterable[str]], Mapping[str, Tensor]]


def take(state: State, plan: Mapping[str, Any], rank: int) -> dict[str, Tensor | Part]:
    """The tensors this rank answers for, as views of its state."""
    tensors: dict[str, Tensor | Part] = {}
    for bucket, entry, value in state.logical(lambda b: b.parameters):
        if bucket.holders[0] == rank:
            tensors[f"weight/{entry.name}"] = value
        if sharded(bucket) or bucket.holders[0] == rank:
            tensors |= {f"{kind}/{entry.name}": _part(bucket, entry, getattr(bucket, kind)) for kind in MOMENTS}
    first = {row["name"] for row in plan["biases"] if row["holders"][0] == rank}
    return tensors | {f"bias/{name}": bias for name, bias in state.biases.items() if name in first}


def put(state: State, read: Read) -> None:
    """Fill this rank's state from logical tensors; `read(names)` gives them whole, by name."""
    for bucket, entry, value in state.logical(lambda b: b.parameters):
        names = [f"{kind}/{entry.name}" for kind in ("weight", *MOMENTS)]
        weight, *moments = (read(names)[name] for name in names)
        value.copy_(weight)
        for kind, moment in zip(MOMENTS, moments, strict=True):
            mine = _part(bucket, entry, getattr(bucket, kind))
            mine.values.copy_(moment.reshape(-1)[mine.start : mine.start + mine.values.numel()])
    for name, bias in state.biases.items():
        bias.copy_(read([f"bias/{name}"])[f"bias/{name}"])


def _part(bucket: Bucket, entry: Entry, owned: Tensor) -> Part:
    """The elements of `entry` that lie in the bucket's owned slice, whose values are `owned`."""
    start = max(entry.start, bucket.owned.start)
    end = max(start, min(entry.end, bucket.owned.stop))
    values = owned[start - bucket.owned.start : end - bucket.owned.start]
    return Part(values, start=start - entry.start if end > start else 0, shape=entry.shape)
