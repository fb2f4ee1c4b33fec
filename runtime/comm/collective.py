"""Channels over torch.distributed, a communicator for each: gloo between processes, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.comm.communicator import Communicator
from runtime.comm.gloo_sums import GlooParts, GlooSums
from runtime.comm.rows import Rows, as_bytes
from runtime.comm.transport import (
    Carrier,
    Channel,
    ChannelError,
    Parts,
    PartsKind,
    Pending,
    Shares,
    Sums,
    Swap,
    SwapKind,
    Work,
    digest,
)


class CollectiveLinks:
    """Communicators of a rank, made and used once in the order in which all ranks open their channels."""

    def __init__(self, communicators: Mapping[Channel, Communicator], checked: bool) -> None:
        self._of, self._checked = communicators, checked
        self.carriers: Mapping[Channel, Carrier] = {channel: each.carrier for channel, each in communicators.items()}
        world = next(each for (kind, _), each in communicators.items() if kind == "world")
        self.sums: Sums = (NcclSums if world.carrier == "nccl" else GlooSums)(world, communicators)

    def edge(self, source: int, destination: int) -> CollectiveEdge:
        communicator = self._of["edge", (source, destination)]
        peer = destination if source == communicator.rank else source
        return CollectiveEdge(communicator, peer, self._checked)

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        communicator = self._of.get((kind, members))
        return CollectiveSwap(communicator) if communicator is not None else None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        communicator = self._of[kind, members]
        return (NcclParts if communicator.carrier == "nccl" else GlooParts)(communicator)

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None


@dataclass
class CollectiveEdge:
    """One direction between two ranks. In a checked run, its name and number go before every message."""

    communicator: Communicator
    peer: int  # world rank at the other end
    checked: bool
    sequence: int = 0

    def send(self, name: str, tensor: Tensor) -> Pending:
        tensor, keep = tensor.contiguous(), tuple[Tensor, ...]()
        works: list[Work] = []
        if self.checked:
            header = torch.tensor([self.sequence, digest(name)], device=tensor.device)
            works.append(self.communicator.send(header, self.peer))
            keep = (header,)
        self.sequence += 1
        works.append(self.communicator.send(as_bytes(tensor), self.peer))
        return Pending(works, tensor, keep)

    def post(self, name: str, buffer: Tensor) -> Pending:
        works: list[Work] = []
        if self.checked:
            expected = torch.tensor([self.sequence, digest(name)], device=buffer.device)
            header = torch.empty_like(expected)
            received = self.communicator.receive(header, self.peer)
            works.append(_Header(received, header, expected, f"recv {name}: rank {self.peer}"))
        works.append(self.communicator.receive(as_bytes(buffer), self.peer))
        self.sequence += 1
        return Pending(works, buffer)


@dataclass
class _Header:
    """What says which message follows."""

    work: Work
    header: Tensor
    expected: Tensor
    what: str

    def wait(self) -> None:
        self.work.wait()
        if not torch.equal(self.header, self.expected):
            raise ChannelError(f"{self.what} sent another message ({self.header.tolist()})")


@dataclass(frozen=True)
class CollectiveSwap:
    communicator: Communicator

    def start(self, name: str, given: Rows, taken: Rows) -> list[Work]:
        sent, room = given.packed(), taken.room()
        work = self.communicator.all_to_all(as_bytes(room), as_bytes(sent), taken.counts, given.counts)
        return [work if room is taken.tensor else _Unpacked(work, room, taken)]


@dataclass(frozen=True)
class _Unpacked:
    """Rows that come member after member, and go to their places once all are there."""

    work: Work
    room: Tensor
    taken: Rows

    def wait(self) -> None:
        self.work.wait()
        self.taken.fill(Rows(self.room, self.taken.counts))


@dataclass(frozen=True)
class NcclParts:
    communicator: Communicator

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> Work:
        return self.communicator.reduce_scatter(self._mine(room), flat)  # in place, if it is the room itself

    def gather(self, name: str, flat: Tensor) -> Work:
        return self.communicator.start_flat_gather(flat, self._mine(flat))  # in place

    def _mine(self, flat: Tensor) -> Tensor:
        members = self.communicator.members
        return flat.chunk(len(members))[members.index(self.communicator.rank)]


@dataclass(frozen=True)
class NcclSums:
    world: Communicator
    communicators: Mapping[Channel, Communicator]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.world.all_reduce(tensor, largest).wait()

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        communicator = self.communicators["reduce", holders]
        even = len({part.stop - part.start for share in shares for part in share}) == 1
        if even and all(len(share) == 1 for share in shares):
            (mine,) = shares[communicator.index_of(communicator.rank)]
            return communicator.reduce_scatter(flat[mine], flat)  # in place
        return communicator.all_reduce(flat)  # parts of matrices are uneven

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        communicator = self.communicators["reduce", holders]
        index = communicator.index_of(communicator.rank)
        sizes = [sum(part.stop - part.start for part in share) for share in shares]
        rows = flat.new_empty(len(shares), max(sizes))  # what is behind the end of a share is not looked at
        mine = flat.new_empty(max(sizes))
        torch.cat([flat[part] for part in shares[index]] or [flat[:0]], out=mine[: sizes[index]])
        communicator.all_gather([as_bytes(row) for row in rows], as_bytes(mine))
        for row, share, size in zip(rows, shares, sizes, strict=True):
            extents = [part.stop - part.start for part in share]
            for part, values in zip(share, row[:size].split(extents), strict=True):
                flat[part].copy_(values)
