"""Channels over torch.distributed: gloo between processes, NCCL between GPUs. One communicator for each channel."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.rows import Rows, raw
from runtime.comm.transport import Channel, ChannelError, Pending, Shares, Sums, Swap, Wanted, Work, digest


class CollectiveLinks:
    """A rank's communicators. Every rank makes all of them, for torch names groups by how many it has made."""

    def __init__(self, rank: int, wanted: Wanted, timeout_s: float, checked: bool) -> None:
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._rank, self._checked = rank, checked
        for kind, ranks in wanted.channels:
            group = dist.new_group(sorted(ranks), timeout=timedelta(seconds=timeout_s), group_desc=f"{kind} {ranks}")
            if rank in ranks:
                self._groups[kind, ranks] = group
        self.sums: Sums = CollectiveSums(self._groups)

    def edge(self, source: int, destination: int) -> CollectiveEdge:
        peer = destination if source == self._rank else source
        return CollectiveEdge(self._groups["edge", (source, destination)], peer, self._checked)

    def swap(self, members: tuple[int, ...]) -> Swap | None:
        group = self._groups.get(("expert", members))
        return CollectiveSwap(group) if group is not None else None

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None


@dataclass
class CollectiveEdge:
    """One direction between two ranks. In a checked run, its name and number go before every message."""

    group: dist.ProcessGroup
    peer: int  # world rank at the other end
    checked: bool
    sequence: int = 0

    def send(self, name: str, tensor: Tensor) -> Pending:
        tensor = tensor.contiguous()
        works: list[Work] = []
        header = torch.tensor([self.sequence, digest(name)], device=tensor.device)
        if self.checked:
            works.append(_work(dist.isend(header, self.peer, self.group)))
        self.sequence += 1
        works.append(_work(dist.isend(_raw(tensor), self.peer, self.group)))
        return Pending(works, tensor, keep=(header,))

    def post(self, name: str, buffer: Tensor) -> Pending:
        works: list[Work] = []
        if self.checked:
            expected = torch.tensor([self.sequence, digest(name)], device=buffer.device)
            header = torch.empty_like(expected)
            received = _work(dist.irecv(header, self.peer, self.group))
            works.append(_Header(received, header, expected, f"recv {name}: rank {self.peer}"))
        works.append(_work(dist.irecv(_raw(buffer), self.peer, self.group)))
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
    group: dist.ProcessGroup

    def start(self, name: str, given: Rows, taken: Rows) -> list[Work]:
        sent, room, sizes = given.packed(), taken.room(), (list(taken.counts), list(given.counts))
        work = _work(dist.all_to_all_single(_raw(room), _raw(sent), *sizes, group=self.group, async_op=True))
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
class CollectiveSums:
    groups: dict[Channel, dist.ProcessGroup]

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor) -> None:
        dist.all_reduce(flat, group=self.groups["reduce", holders])  # gloo has no reduce-scatter

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        group, index = self.groups["reduce", holders], holders.index(dist.get_rank())
        sizes = [sum(part.stop - part.start for part in share) for share in shares]
        rows = flat.new_empty(len(shares), max(sizes))  # what is behind the end of a share is not looked at
        mine = flat.new_empty(max(sizes))
        torch.cat([flat[part] for part in shares[index]] or [flat[:0]], out=mine[: sizes[index]])
        dist.all_gather([_raw(row) for row in rows], _raw(mine), group=group)
        for row, share, size in zip(rows, shares, sizes, strict=True):
            extents = [part.stop - part.start for part in share]
            for part, values in zip(share, row[:size].split(extents), strict=True):
                flat[part].copy_(values)


def _raw(tensor: Tensor) -> Tensor:
    """A tensor that is moved and not summed, as bytes where gloo does not know the dtype. Rows stay rows."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else raw(tensor)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work
