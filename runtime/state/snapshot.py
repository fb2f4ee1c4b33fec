"""A rank's state as logical tensors, and back: what a checkpoint holds, whatever the plan.

Names: `weight/<parameter>`, `<state>/<parameter>` for each tensor of the optimizer's state, `ema/<parameter>` for the
moving average of the weights if the run keeps one, `bias/<router bias>`, `table/<router table>`. Where adapters are
trained there is nothing of frozen weights, balancing biases and tables: these are in the checkpoint that the run began
with. A weight is the master weight. Of replicas the first holder answers for a weight; with sharded optimizer state
each holder answers for its part of the state, and of weights that no other holder has: master weights that are none of
its parameters, or weights that are sharded, too.
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
    """The tensors this rank answers for, as views of its state."""
    tensors: dict[str, Tensor | TensorPart] = {}
    for bucket, entry in state.entries():
        owned, answers = _owned(bucket, entry), bucket.holders[0] == rank
        if bucket.shares and (bucket.mixed or bucket.gathered):
            tensors |= {name: part for name, part in owned.items() if name.kind == WEIGHT}
        elif answers:
            name = StoredName.of(WEIGHT, entry.name)
            whole = owned[name].values if bucket.mixed else bucket.parameters[entry.start : entry.end]
            tensors[name] = _part(entry, whole, 0)
        if bucket.shares or answers:
            tensors |= {name: part for name, part in owned.items() if name.kind != WEIGHT}
    first = {each.stored for each in plan.untrained if each.holders[0] == rank and not plan.frozen}
    return tensors | {name: each for name, each in state.untrained.items() if name in first}


class HostCopy:
    """Room in the memory of the host for a copy of what a rank answers for. It is made once, and used by every copy."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def of(self, tensors: ShardData) -> dict[str, Tensor | TensorPart]:
        """A copy of these tensors, whole when this returns. It holds until the next one is made."""
        values = {name: each if isinstance(each, Tensor) else each.values for name, each in tensors.items()}
        if not self._room:
            self._room = _room_of(values)
        for name, each in values.items():
            self._room[name].copy_(each, non_blocking=True)
        for device in {each.device for each in values.values() if each.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return {
            name: replace(each, values=self._room[name]) if isinstance(each, TensorPart) else self._room[name]
            for name, each in tensors.items()
        }


def _room_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes on the host, one allocation for each dtype and device: there they lie by name, as in
    the file of a checkpoint."""
    room: dict[str, Tensor] = {}
    kinds = {(each.dtype, each.device) for each in values.values()}
    for dtype, device in sorted(kinds, key=str):
        alike = {name: each for name, each in sorted(values.items()) if (each.dtype, each.device) == (dtype, device)}
        sizes = [each.numel() for each in alike.values()]
        flats = host_zeros(sum(sizes), dtype, device).split(sizes)
        room |= {name: flat.view(each.shape) for (name, each), flat in zip(alike.items(), flats, strict=True)}
    return room


def put(state: State, read: Read, averaged: bool = True) -> None:
    """Fill this rank's state from logical tensors; `read(names)` gives them whole, by name. Frozen weights are left as
    they are.

    Where they are not `averaged`, a moving average begins with the weights.
    """
    for bucket, entry in state.entries():
        owned = _owned(bucket, entry)
        if not averaged:
            owned.pop(StoredName.of(AVERAGE, entry.name), None)
        weight = StoredName.of(WEIGHT, entry.name)
        tensors = read({weight, *owned})
        bucket.set_weight(entry, tensors[weight])
        for name, mine in owned.items():
            if name.kind != WEIGHT:
                flat = entry.cut(tensors[name]).reshape(-1)
                mine.values.copy_(flat[mine.start : mine.start + mine.values.numel()])
    for name, each in state.untrained.items() if not state.frozen else ():
        each.copy_(read([name])[name])


def put_weights(state: State, read: Read, held: Container[str], kind: str = WEIGHT) -> None:
    """Give this rank's parameters, balancing biases and tables their values from logical tensors, as far as these are
    `held`. What is not keeps its first values: indexers, as the compiler has seen to.

    `kind`: which tensors the values are of what is trained, WEIGHT or AVERAGE.
    """
    for bucket, entry in state.entries():
        name = StoredName.of(kind, entry.name)
        if name in held:
            bucket.set_weight(entry, read([name])[name])
    put_untrained(state, read, held)


def put_untrained(state: State, read: Read, held: Container[str]) -> None:
    """Give frozen weights, balancing biases and tables their values, the latter two where they are `held`."""
    for bucket in state.frozen:
        for entry in bucket.entries:
            name = StoredName.of(WEIGHT, entry.name)
            bucket.set_weight(entry, read([name])[name])
    for name, each in state.untrained.items():
        if name in held:
            each.copy_(read([name])[name])


def _owned(bucket: FlatBucket, entry: BucketEntry) -> dict[StoredName, TensorPart]:
    """What is owned here of a parameter, by name: its master weight, and its optimizer state."""
    if (found := bucket.owned_of(entry)) is None:
        return {}
    of_entry, piece, of_piece = found
    kinds = {WEIGHT: piece.master, **piece.state} | ({AVERAGE: piece.average} if piece.average is not None else {})
    return {
        StoredName.of(kind, entry.name): _part(entry, flat[of_piece], of_entry.start) for kind, flat in kinds.items()
    }


def _part(entry: BucketEntry, values: Tensor, start: int) -> TensorPart:
    """Elements of what is held of a parameter, from `start` on."""
    return TensorPart(values, start, entry.shape, entry.parameter.slice)
