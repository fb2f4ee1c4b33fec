"""Channels of ranks that share a GPU: what they tell each other goes through the host's memory.

NCCL wants a device for every rank. Where several compute on one, a tensor is copied to the host and given to channels
of the host, shared memory or gloo, and what comes is copied to the device when it is waited for. The same program runs
and the same numbers are summed in the same order, at the host's pace: it is for trying out a run of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.comm.rows import Rows
from runtime.comm.transport import Edge, Links, Parts, PartsKind, Pending, Shares, Sums, Swap, SwapKind, Work


class StagedLinks:
    """The channels `host`, for tensors of a device."""

    def __init__(self, host: Links) -> None:
        self.host = host
        self.sums: Sums = StagedSums(host)
        self.carriers = host.carriers

    def edge(self, source: int, destination: int) -> StagedEdge:
        return StagedEdge(self.host.edge(source, destination))

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        swap = self.host.swap(kind, members)
        return None if swap is None else StagedSwap(swap)

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> StagedParts:
        return StagedParts(self.host.parts(kind, members))

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None  # on the device; its copy on the host is made where it is summed


@dataclass(frozen=True)
class StagedEdge:
    host: Edge

    def send(self, name: str, tensor: Tensor) -> Pending:
        return self.host.send(name, tensor.cpu())

    def post(self, name: str, buffer: Tensor) -> Pending:
        staged = _like(buffer)
        return Pending([_Arrival([self.host.post(name, staged)], staged, buffer)], buffer)


@dataclass(frozen=True)
class StagedSwap:
    host: Swap

    def start(self, name: str, given: Rows, taken: Rows) -> list[Work]:
        sent, room = given.packed().cpu(), taken.room()
        staged = _like(room)
        works = self.host.start(name, Rows(sent, given.counts), Rows(staged, taken.counts))
        return [_Arrival(works, staged, room, keep=sent, places=None if room is taken.tensor else taken)]


@dataclass(frozen=True)
class StagedParts:
    host: Parts

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> _Arrival:
        staged = flat.cpu()
        return _Arrival([self.host.scatter(name, staged, staged)], staged, room)

    def gather(self, name: str, flat: Tensor) -> _Arrival:
        staged = flat.cpu()
        return _Arrival([self.host.gather(name, staged)], staged, flat)


@dataclass(frozen=True)
class _Arrival:
    """What is to come to the host, and then to the device, where rows go on to their `places`. `keep` must live until
    then."""

    works: Sequence[Work]
    staged: Tensor
    out: Tensor
    keep: Tensor | None = None
    places: Rows | None = None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.out.copy_(self.staged)
        if self.places is not None:
            self.places.fill(Rows(self.out, self.places.counts))


@dataclass
class StagedSums:
    """Flat tensors have one copy each on the host, where the host's channels want it."""

    host: Links
    copies: dict[str, Tensor] = field(default_factory=dict)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        staged = tensor.cpu()
        self.host.sums.all_reduce(staged, largest)
        tensor.copy_(staged)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        staged = self._copy_of(bucket, flat)
        staged.copy_(flat)
        return _Arrival([self.host.sums.start_reduce(bucket, holders, staged, shares)], staged, flat)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        staged = self._copy_of(bucket, flat)
        staged.copy_(flat)
        self.host.sums.gather(bucket, holders, staged, shares)
        flat.copy_(staged)

    def _copy_of(self, bucket: str, flat: Tensor) -> Tensor:
        if bucket not in self.copies:
            placed = self.host.flat(bucket, flat.numel(), flat.dtype)
            self.copies[bucket] = _like(flat) if placed is None else placed
        return self.copies[bucket]


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
