"""A rank's state as logical tensors, and back: what a checkpoint holds, whatever the plan.

Names: `weight/<parameter>`, `moment1/<parameter>`, `moment2/<parameter>`, `bias/<router bias>`. A weight is the master
weight. Of replicas the first holder answers for a weight; with sharded optimizer state each holder answers for its part
of the moments, and of master weights that are none of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from runtime.checkpoint import Part
from runtime.contract import Plan
from runtime.optimizer import sharded
from runtime.state import Bucket, Entry, State

MOMENTS = ("moment1", "moment2")
Read = Callable[[Iterable[str]], Mapping[str, Tensor]]


def take(state: State, plan: Plan, rank: int) -> dict[str, Tensor | Part]:
    """The tensors this rank answers for, as views of its state."""
    tensors: dict[str, Tensor | Part] = {}
    for bucket, entry, value in state.logical(lambda b: b.parameters):
        if bucket.mixed and sharded(bucket):
            tensors[f"weight/{entry.name}"] = _part(bucket, entry, bucket.master)
        elif bucket.holders[0] == rank:
            tensors[f"weight/{entry.name}"] = _whole(bucket, entry) if bucket.mixed else value
        if sharded(bucket) or bucket.holders[0] == rank:
            tensors |= {f"{kind}/{entry.name}": _part(bucket, entry, getattr(bucket, kind)) for kind in MOMENTS}
    first = {bias.name for bias in plan.biases if bias.holders[0] == rank}
    return tensors | {f"bias/{name}": bias for name, bias in state.biases.items() if name in first}


def put(state: State, read: Read) -> None:
    """Fill this rank's state from logical tensors; `read(names)` gives them whole, by name."""
    for bucket, entry, _ in state.logical(lambda b: b.parameters):
        names = [f"{kind}/{entry.name}" for kind in ("weight", *MOMENTS)]
        weight, *moments = (read(names)[name] for name in names)
        bucket.set_weight(entry, weight)
        for kind, moment in zip(MOMENTS, moments, strict=True):
            mine = _part(bucket, entry, getattr(bucket, kind))
            mine.values.copy_(moment.reshape(-1)[mine.start : mine.start + mine.values.numel()])
    for name, bias in state.biases.items():
        bias.copy_(read([f"bias/{name}"])[f"bias/{name}"])


def _part(bucket: Bucket, entry: Entry, owned: Tensor) -> Part:
    """The elements of `entry` that lie in the bucket's owned slice, whose values are `owned`."""
    of_entry, of_owned = bucket.owned_of(entry)
    return Part(owned[of_owned], start=of_entry.start, shape=entry.shape)


def _whole(bucket: Bucket, entry: Entry) -> Tensor:
    """The master weights of `entry`, all of which are here."""
    return bucket.master[entry.start : entry.end].view(entry.shape)
