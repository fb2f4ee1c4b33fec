"""Optimizer state in the memory of the host: an update takes it to the device and back, part by part.

While one part is updated, the next one arrives and the last one leaves, on a stream each way: three parts are on the
device. The update runs where it does without offload, by the same code: so its numbers are the same.
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
    """Elements `part` of a bucket that are updated by one call, with the weight decay `decay`. They lie in `piece`, and
    have this `shape` if it is no vector."""

    bucket: FlatBucket
    piece: OwnedPiece
    part: slice
    decay: float
    shape: tuple[int, ...]

    @property
    def kept(self) -> list[Tensor]:
        """Master weights and state of these elements, where they lie between two steps."""
        mine = slice(self.part.start - self.piece.part.start, self.part.stop - self.piece.part.start)
        return [tensor[mine] for tensor in (self.piece.master, *self.piece.state.values())]


@dataclass
class _CopySlot:
    """Room for one part on the device. What arrived in it may be updated; after `left` another part may come."""

    tensors: list[Tensor]
    arrived: torch.cuda.Event | None = None
    left: torch.cuda.Event | None = None


class CopyLane:
    """Copies in one direction, one after another. On CUDA they run on a stream beside kernels, elsewhere at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[torch.cuda.Event | None]
    ) -> torch.cuda.Event | None:
        """Copy (target, source) pairs after some events; the event of the end of it, on CUDA."""
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
    """The way of a rank's offloaded state to its device and back. On a CPU nothing moves.

    `part`: the most elements of a part that is no whole matrix. `slots`: parts that are on the device.
    """

    state: State
    part: int
    slots: int
    _lanes: list[CopyLane] = field(default_factory=list)
    _room: list[_CopySlot] = field(default_factory=list)  # while a step updates
    _is_of_rest: bool = False  # which of the two kinds of the optimizer the room is of

    @cached_property
    def most(self) -> int | None:
        """Elements that one call updates at most, of what is no matrix; None: any number."""
        pieces = (piece for bucket in self.state.buckets for piece in bucket.owned)
        return self.part if any(map(self._away, pieces)) else None

    def slot_elements(self, rest: bool) -> int:
        """Elements of a part for which there is room on the device, while one kind of the optimizer updates."""
        pieces = (piece for bucket in self.state.buckets if bucket.rest == rest for piece in bucket.owned)
        sizes = [(piece.part.stop - piece.part.start, len(piece.shapes[0]) > 1) for piece in pieces]
        return max((size if is_matrix else min(size, self.part) for size, is_matrix in sizes), default=0)

    def _away(self, piece: OwnedPiece) -> list[int]:
        """Which of the tensors of its updates are not on the device."""
        tensors = piece.master, *piece.state.values()
        return [i for i, t in enumerate(tensors) if t.device.type != self.state.device.type]

    def through(self, updates: Sequence[Update]) -> Iterator[tuple[Update, list[Tensor]]]:
        """Each update with its master weights and state on the device; they go back before the next one is given."""
        away = self._away(updates[0].piece) if updates else []
        if not away:
            for update in updates:
                yield update, update.kept
            return
        device = self.state.device
        self._lanes = self._lanes or [CopyLane(device), CopyLane(device)]
        up, down = self._lanes
        is_of_rest = updates[0].bucket.rest
        if not self._room or is_of_rest != self._is_of_rest:  # whose parameters are others, with other state
            self.finish()
            self._is_of_rest = is_of_rest
            self._room = [_CopySlot(self._new_room(updates[0], away), left=mark(device)) for _ in range(self.slots)]
        slots = self._room

        def fetch(index: int) -> list[Tensor]:
            """Start the way of a part to the device; what will be there."""
            slot, kept = slots[index % self.slots], updates[index].kept
            there = dict(zip(away, slot.tensors, strict=True))
            views = [there[i][: t.numel()] if i in there else t for i, t in enumerate(kept)]
            slot.arrived = up.copy([(views[i], kept[i]) for i in away], [slot.left])
            return views

        views = fetch(0)
        for index, update in enumerate(updates):
            following = fetch(index + 1) if index + 1 < len(updates) else []
            slot = slots[index % self.slots]
            if slot.arrived is not None:
                torch.cuda.current_stream(device).wait_event(slot.arrived)
            yield update, views
            kept = update.kept
            slot.left = down.copy([(kept[i], views[i]) for i in away], [mark(device)])
            views = following

    def finish(self) -> None:
        """End the updates of a step: return when all state is in the memory of the host. Its room is given back."""
        for lane in self._lanes:
            lane.synchronize()
        self._room = []

    def _new_room(self, like: Update, away: Sequence[int]) -> list[Tensor]:
        extent = self.slot_elements(like.bucket.rest)
        return [torch.empty(extent, dtype=like.kept[i].dtype, device=self.state.device) for i in away]


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The event that all work given to the device so far is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
