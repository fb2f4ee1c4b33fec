"""Sums over gloo in the order of ranks: the bits are those of ranks that share memory, wherever the ranks are.

The sums that gloo makes itself are in the order of a ring. So a rank gets its share of all holders, and adds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from runtime.comm.communicator import Communicator
from runtime.comm.parts import Summed
from runtime.comm.rows import as_bytes
from runtime.comm.transport import Channel, Shares, Work, equal_shares, largest_of, sum_in_order


@dataclass(frozen=True)
class GlooSums:
    world: Communicator
    communicators: Mapping[Channel, Communicator]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        mine = tensor.view(-1)
        rows = [*mine.new_empty(len(self.world.members), mine.numel())]
        self.world.all_gather([as_bytes(row) for row in rows], as_bytes(mine))
        mine.copy_(largest_of(rows) if largest else sum_in_order(rows))

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        communicator = self.communicators["reduce", holders]
        if len(holders) == 2 and not shares:
            return communicator.all_reduce(flat)  # a + b is b + a
        parts = _parts(flat, shares or equal_shares(flat.numel(), len(holders)))
        here = communicator.index_of(communicator.rank)
        rows = [
            parts[here] if at == here else [part.new_empty(part.shape) for part in parts[here]]
            for at in range(len(parts))
        ]
        return _Summing(communicator, _exchange(communicator, parts, rows), parts, rows, for_all=not shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        _take(self.communicators["reduce", holders], _parts(flat, shares))


@dataclass(frozen=True)
class _Summing:
    """Parts of a tensor that are under way: this rank's part of each holder, to its `rows`."""

    communicator: Communicator
    works: Sequence[Work]
    parts: Sequence[Sequence[Tensor]]
    rows: Sequence[Sequence[Tensor]]
    for_all: bool  # whether each holder needs the sums of all parts

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        mine = self.parts[self.communicator.index_of(self.communicator.rank)]
        for part, *each in zip(mine, *self.rows, strict=True):
            part.copy_(sum_in_order(each))
        if self.for_all:
            _take(self.communicator, self.parts)


def _take(communicator: Communicator, parts: Sequence[Sequence[Tensor]]) -> None:
    """Give each holder the parts of the others, of which each has its own."""
    mine = parts[communicator.index_of(communicator.rank)]
    for work in _exchange(communicator, [mine] * len(parts), parts):
        work.wait()


def _parts(flat: Tensor, shares: Shares) -> list[list[Tensor]]:
    """The parts of each holder, without those that are empty."""
    return [[flat[part] for part in share if part.stop > part.start] for share in shares]


def _exchange(
    communicator: Communicator, given: Sequence[Sequence[Tensor]], taken: Sequence[Sequence[Tensor]]
) -> list[Work]:
    """Begin to give each other member its tensors, in place, and to take as many from it as there is room for."""
    others = [at for at, member in enumerate(communicator.members) if member != communicator.rank]
    works = [communicator.receive(as_bytes(each), communicator.members[at]) for at in others for each in taken[at]]
    works += [communicator.send(as_bytes(each), communicator.members[at]) for at in others for each in given[at]]
    return works


@dataclass(frozen=True)
class GlooParts:
    communicator: Communicator

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> Summed:
        count = len(self.communicator.members)
        given, ones = flat.view(count, -1), (1,) * count
        taken = given.new_empty(given.shape) if room is flat else room.view(count, -1)
        work = self.communicator.all_to_all(as_bytes(taken), as_bytes(given), ones, ones)
        return Summed([work], [*taken], room.view(count, -1)[self.communicator.index_of(self.communicator.rank)])

    def gather(self, name: str, flat: Tensor) -> Work:
        parts = flat.chunk(len(self.communicator.members))
        mine = parts[self.communicator.index_of(self.communicator.rank)]
        return self.communicator.start_all_gather([as_bytes(part) for part in parts], as_bytes(mine))
