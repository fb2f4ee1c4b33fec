"""Activation offload: action O copies what a forward saved to the host, action R copies it back for the backward.

Whole storages are copied, so that values which share a storage share it again. The storages of one stage and
micro-batch are in one host buffer, which is reused for the same stage once they are back. On CUDA the buffers are
pinned, and each direction has its own stream; elsewhere copies are synchronous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from runtime.state.offload import CopyLane, mark

Key = tuple[int, int]  # a stage and a micro-batch


@dataclass
class _Room:
    """A buffer of the host. It may be written again after `free`."""

    buffer: Tensor  # uint8
    free: torch.cuda.Event | None = None


@dataclass(frozen=True)
class _StoredValue:
    """The view of a value on the storage with this number."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements

    def view_in(self, flat: Tensor) -> Tensor:
        """Return the value as a view of the bytes of its storage."""
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _OffloadedValues:
    """The offloaded values of one stage and micro-batch, and the sizes of their storages in bytes."""

    room: _Room
    values: list[_StoredValue]
    sizes: list[int]
    departed: torch.cuda.Event | None  # recorded when the copy to the host ends


@dataclass
class HostCopies:
    """The offloaded activations of a rank and their host buffers, which are kept for the next step."""

    device: torch.device
    _lanes: list[CopyLane] = field(default_factory=list)  # to the host, and back
    _rooms: dict[int, list[_Room]] = field(default_factory=dict)  # free buffers, by stage
    _ended: dict[Key, torch.cuda.Event | None] = field(default_factory=dict)  # forwards whose values will be offloaded
    _offloaded: dict[Key, _OffloadedValues] = field(default_factory=dict)
    coming: dict[Key, torch.cuda.Event | None] = field(default_factory=dict)  # being copied back

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        rooms = [room for of_stage in self._rooms.values() for room in of_stage]
        return sum(room.buffer.nbytes for room in (*rooms, *(offloaded.room for offloaded in self._offloaded.values())))

    @property
    def is_empty(self) -> bool:
        """Whether no activation is on the host or being copied."""
        return not (self._ended or self._offloaded or self.coming)

    def mark_forward_end(self, key: Key) -> None:
        """Mark the end of a forward: the copy of its values waits for this point, not for the later call of `take`."""
        self._ended[key] = mark(self.device)

    def take(self, key: Key, tensors: tuple[Tensor, ...]) -> None:
        """Start to copy tensors to the host. Later work of the device waits for the copy, so they may be freed."""
        self._lanes = self._lanes or [CopyLane(self.device), CopyLane(self.device)]
        numbers: dict[int, int] = {}  # number of each storage, by its address
        flats: list[Tensor] = []
        values = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage._cdata, len(flats))
            if number == len(flats):
                flats.append(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8))
            values.append(
                _StoredValue(number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            )
        sizes = [flat.numel() for flat in flats]
        room = self._room(key[0], sum(sizes))
        pairs = list(zip(_parts(room.buffer, sizes), flats, strict=True))
        copied = self._lanes[0].copy(pairs, [self._ended.pop(key), room.free])
        _wait(self.device, copied)
        self._offloaded[key] = _OffloadedValues(room, values, sizes, copied)

    def bring(self, key: Key) -> list[Tensor]:
        """Start to copy tensors back to the device. Call `wait` before they are read."""
        offloaded = self._offloaded.pop(key)
        flats = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in offloaded.sizes]
        pairs = list(zip(flats, _parts(offloaded.room.buffer, offloaded.sizes), strict=True))
        offloaded.room.free = self._lanes[1].copy(pairs, [mark(self.device), offloaded.departed])
        self.coming[key] = offloaded.room.free
        self._rooms.setdefault(key[0], []).append(offloaded.room)
        return [value.view_in(flats[value.storage]) for value in offloaded.values]

    def wait(self, key: Key) -> None:
        """Make the device wait until the tensors of `bring` have arrived, if there are any."""
        _wait(self.device, self.coming.pop(key, None))

    def _room(self, stage: int, num_bytes: int) -> _Room:
        """Return a free buffer of the stage, or a new one if there is none or it is too small."""
        free = self._rooms.get(stage)
        room = free.pop(0) if free else None
        if room is None or room.buffer.numel() < num_bytes:
            return _Room(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type != "cpu"))
        return room


def _parts(buffer: Tensor, sizes: list[int]) -> list[Tensor]:
    """Split a buffer into the bytes of each storage."""
    starts = accumulate(sizes, initial=0)
    return [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
