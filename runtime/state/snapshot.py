"""Converts a rank's state to logical tensors and back: the content of a checkpoint, independent of the plan.

Names: `weight/<parameter>`, `<state>/<parameter>` for each tensor of the optimizer state, `ema/<parameter>` for the
moving average of the weights if the run keeps one, `bias/<router bias>`, `table/<router table>`. If adapters are
trained, frozen weights, balancing biases and tables are left out: they are in the checkpoint that the run started with.
A weight is the master weight. The first holder saves a replicated weight. With sharded optimizer state each holder
saves its shard of the state, and its shard of the weights if it has them alone: separate master weights, or sharded
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from runtime.checkpoint.publish import ShardData, TensorPart
from runtime.contract import RunPlan
from runtime.contract.names import AVERAGE, WEIGHT, StoredName
from runtime.state.state import BucketEntry, FlatBucket, State, host_zeros

Read = Callable[[Iterable[str]], Mapping[str, Tensor]]


def take(state: State, plan: RunPlan, rank: int) -> dict[str, Tensor | TensorPart]:
    """Return the tensors that this rank saves, as views of its state."""
    tensors: dict[str, Tensor | TensorPart] = {}
    for bucket, entry in state.entries():
        owned, answers = _owned_parts(bucket, entry), bucket.holders[0] == rank
        if bucket.shares and (bucket.has_masters or bucket.is_gathered):
            tensors |= {name: part for name, part in owned.items() if name.kind == WEIGHT}
        elif answers:
            name = StoredName.of(WEIGHT, entry.name)
            weights = owned[name].values if bucket.has_masters else bucket.parameters[entry.start : entry.end]
            tensors[name] = _part(entry, weights, 0)
        if bucket.shares or answers:
            tensors |= {name: part for name, part in owned.items() if name.kind != WEIGHT}
    first = {untrained.stored for untrained in plan.untrained if untrained.holders[0] == rank and not plan.frozen}
    return tensors | {name: tensor for name, tensor in state.untrained.items() if name in first}


class HostCopy:
    """A host buffer for copies of the tensors that a rank saves. It is allocated once and reused."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def copy(self, tensors: ShardData) -> dict[str, Tensor | TensorPart]:
        """Return a complete copy of these tensors. It is valid until the next call."""
        values = {name: tensor if isinstance(tensor, Tensor) else tensor.values for name, tensor in tensors.items()}
        if not self._room:
            self._room = _room_of(values)
        for name, value in values.items():
            self._room[name].copy_(value, non_blocking=True)
        for device in {value.device for value in values.values() if value.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return {
            name: replace(tensor, values=self._room[name]) if isinstance(tensor, TensorPart) else self._room[name]
            for name, tensor in tensors.items()
        }


def _room_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Allocate host tensors of the same shapes, one allocation per dtype and device, ordered by name as in the file of
    a checkpoint."""
    room: dict[str, Tensor] = {}
    kinds = {(tensor.dtype, tensor.device) for tensor in values.values()}
    for dtype, device in sorted(kinds, key=str):
        group = {
            name: tensor for name, tensor in sorted(values.items()) if (tensor.dtype, tensor.device) == (dtype, device)
        }
        sizes = [tensor.numel() for tensor in group.values()]
        flats = host_zeros(sum(sizes), dtype, device).split(sizes)
        room |= {name: flat.view(tensor.shape) for (name, tensor), flat in zip(group.items(), flats, strict=True)}
    return room


def put_state(state: State, read: Read, averaged: bool = True) -> None:
    """Fill this rank's state from logical tensors. `read(names)` returns whole tensors by name. Frozen weights do not
    change.

    If the tensors have no moving average (`averaged`), it starts as a copy of the weights.
    """
    for bucket, entry in state.entries():
        owned = _owned_parts(bucket, entry)
        if not averaged:
            owned.pop(StoredName.of(AVERAGE, entry.name), None)
        weight = StoredName.of(WEIGHT, entry.name)
        tensors = read({weight, *owned})
        bucket.set_weight(entry, tensors[weight])
        for name, mine in owned.items():
            if name.kind != WEIGHT:
                flat = entry.cut(tensors[name]).reshape(-1)
                mine.values.copy_(flat[mine.start : mine.start + mine.values.numel()])
    for name, tensor in state.untrained.items() if not state.frozen else ():
        tensor.copy_(read([name])[name])


def put_weights(state: State, read: Read, names: Container[str], kind: str = WEIGHT) -> None:
    """Load this rank's parameters, balancing biases and tables from logical tensors, as far as these are in `names`.
    Others keep their initial values; the compiler allows this for indexers alone.

    `kind`: kind of the tensors that trained parameters are loaded from, WEIGHT or AVERAGE.
    """
    for bucket, entry in state.entries():
        name = StoredName.of(kind, entry.name)
        if name in names:
            bucket.set_weight(entry, read([name])[name])
    put_untrained(state, read, names)


def put_untrained(state: State, read: Read, names: Container[str]) -> None:
    """Load frozen weights, and those balancing biases and tables that `names` has."""
    for bucket in state.frozen:
        for entry in bucket.entries:
            name = StoredName.of(WEIGHT, entry.name)
            bucket.set_weight(entry, read([name])[name])
    for name, tensor in state.untrained.items():
        if name in names:
            tensor.copy_(read([name])[name])


def _owned_parts(bucket: FlatBucket, entry: BucketEntry) -> dict[StoredName, TensorPart]:
    """Return the parts of a parameter's master weight and optimizer state that this rank owns, by name."""
    if (owned := bucket.owned_part(entry)) is None:
        return {}
    of_entry, piece, of_piece = owned
    kinds = {WEIGHT: piece.master, **piece.state} | ({AVERAGE: piece.average} if piece.average is not None else {})
    return {
        StoredName.of(kind, entry.name): _part(entry, flat[of_piece], of_entry.start) for kind, flat in kinds.items()
    }


def _part(entry: BucketEntry, values: Tensor, start: int) -> TensorPart:
    """Describe elements of the held slice of a parameter, from `start` on."""
    return TensorPart(values, start, entry.shape, entry.parameter.slice)
