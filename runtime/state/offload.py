"""Optimizer state offloaded to the host: an update copies it to the device and back, part by part.

While one part is updated, the next one is copied to the device and the last one back, on separate streams: three parts
are on the device. The same code updates on the same device as without offload, so results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from runtime.state.state import FlatBucket, OwnedPiece, State


@dataclass(frozen=True)
class Update:
    """Elements `part` of a bucket that one call updates, with weight decay `decay`. They belong to `piece`. `shape` is
    their shape as a matrix, or of a vector."""

    bucket: FlatBucket
    piece: OwnedPiece
    part: slice
    decay: float
    shape: tuple[int, ...]

    @property
    def stored(self) -> list[Tensor]:
        """Master weights and state of these elements, at their place between two steps."""
        mine = slice(self.part.start - self.piece.part.start, self.part.stop - self.piece.part.start)
        return [tensor[mine] for tensor in (self.piece.master, *self.piece.state.values())]


@dataclass
class _CopySlot:
    """Device buffers for one part. It may be updated after `arrived`, and replaced by another part after `departed`."""

    tensors: list[Tensor]
    arrived: torch.cuda.Event | None = None
    departed: torch.cuda.Event | None = None


class CopyLane:
    """Copies in one direction, in order: on CUDA on a separate stream, elsewhere synchronously."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[torch.cuda.Event | None]
    ) -> torch.cuda.Event | None:
        """Copy (target, source) pairs after some events. On CUDA, return the event of the end."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            for event in after:
                if event is not None:
                    self._stream.wait_event(event)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def synchronize(self) -> None:
        """Wait on the host until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass
class Staging:
    """Moves a rank's offloaded state to its device and back. On a CPU nothing moves.

    `part`: most elements of a part, unless it is a whole matrix. `slots`: number of parts on the device.
    """

    state: State
    part: int
    slots: int
    _lanes: list[CopyLane] = field(default_factory=list)
    _room: list[_CopySlot] = field(default_factory=list)  # during the update of a step
    _is_of_rest: bool = False  # whether the buffers are for `rest`, the second kind of optimizer

    @cached_property
    def max_elements(self) -> int | None:
        """Most elements that one call updates, except for matrices; None if unlimited."""
        pieces = (piece for bucket in self.state.buckets for piece in bucket.owned)
        return self.part if any(map(self._indices_off_device, pieces)) else None

    def slot_elements(self, is_of_rest: bool) -> int:
        """Return the elements of a device buffer, for buckets of one kind of optimizer."""
        pieces = (piece for bucket in self.state.buckets if bucket.is_of_rest == is_of_rest for piece in bucket.owned)
        sizes = [(piece.part.stop - piece.part.start, len(piece.shapes[0]) > 1) for piece in pieces]
        return max((size if is_matrix else min(size, self.part) for size, is_matrix in sizes), default=0)

    def _indices_off_device(self, piece: OwnedPiece) -> list[int]:
        """Return the indices of the tensors of an update that are not on the device."""
        tensors = piece.master, *piece.state.values()
        return [i for i, t in enumerate(tensors) if t.device.type != self.state.device.type]

    def stage_updates(self, updates: Sequence[Update]) -> Iterator[tuple[Update, list[Tensor]]]:
        """Yield each update with its master weights and state on the device. They are copied back after it."""
        off_device = self._indices_off_device(updates[0].piece) if updates else []
        if not off_device:
            for update in updates:
                yield update, update.stored
            return
        device = self.state.device
        self._lanes = self._lanes or [CopyLane(device), CopyLane(device)]
        up, down = self._lanes
        is_of_rest = updates[0].bucket.is_of_rest
        if not self._room or is_of_rest != self._is_of_rest:  # the other kind of optimizer has other state
            self.finish()
            self._is_of_rest = is_of_rest
            self._room = [
                _CopySlot(self._new_room(updates[0], off_device), departed=mark(device)) for _ in range(self.slots)
            ]
        slots = self._room

        def fetch(index: int) -> list[Tensor]:
            """Start to copy a part to the device. Return its tensors there."""
            slot, host_tensors = slots[index % self.slots], updates[index].stored
            on_device = dict(zip(off_device, slot.tensors, strict=True))
            views = [on_device[i][: t.numel()] if i in on_device else t for i, t in enumerate(host_tensors)]
            slot.arrived = up.copy([(views[i], host_tensors[i]) for i in off_device], [slot.departed])
            return views

        views = fetch(0)
        for index, update in enumerate(updates):
            following = fetch(index + 1) if index + 1 < len(updates) else []
            slot = slots[index % self.slots]
            if slot.arrived is not None:
                torch.cuda.current_stream(device).wait_event(slot.arrived)
            yield update, views
            host_tensors = update.stored
            slot.departed = down.copy([(host_tensors[i], views[i]) for i in off_device], [mark(device)])
            views = following

    def finish(self) -> None:
        """End the updates of a step: return when all state is on the host. Frees the device buffers."""
        for lane in self._lanes:
            lane.synchronize()
        self._room = []

    def _new_room(self, like: Update, off_device: Sequence[int]) -> list[Tensor]:
        extent = self.slot_elements(like.bucket.is_of_rest)
        return [torch.empty(extent, dtype=like.stored[i].dtype, device=self.state.device) for i in off_device]


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Record an event after all work that was queued on the device so far; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
