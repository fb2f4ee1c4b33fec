"""Channels over torch.distributed, one communicator each: gloo between processes, NCCL between GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.transport import (
    Carrier,
    Channel,
    ChannelError,
    Parts,
    PartsKind,
    Pending,
    PendingReduceScatter,
    Rows,
    Shares,
    Sums,
    Swap,
    SwapKind,
    Work,
    as_bytes,
    digest,
    equal_shares,
    largest_of,
    sum_in_order,
)
from runtime.system.outcome import ReportedError

# --- Rendezvous before a channel is opened: each rank records its progress in a store, so that missing ranks are known
#
# Opening a channel blocks until all its ranks take part, on GPUs forever. So ranks first wait for each other in the
# store by which they were started, with a timeout.


class MissingRankError(ReportedError):
    """Ranks did not arrive in time. The message names them and the point at which this rank waits."""

    def __init__(self, missing: Sequence[int], timeout_s: float, point: str) -> None:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        super().__init__(f"{ranks} did not come within {timeout_s:g} s: this rank waits in `{point}`", of_peer=True)
        self.missing = tuple(missing)


class Meeting:
    """Rendezvous of the ranks of a starting world: a rank calls `arrive` for one point after another.

    All ranks construct their meetings in the same order. `set_action` is called with the point at which the rank waits.
    """

    def __init__(
        self, store: dist.Store, rank: int, timeout_s: float, set_action: Callable[[str], None] = lambda _: None
    ) -> None:
        number = store.add(f"dsc/starts of rank {rank}", 1)
        self.store = dist.PrefixStore(f"dsc/start {number}", store)
        self._rank, self._timeout_s, self._set_action = rank, timeout_s, set_action

    def arrive(self, point: str, members: Sequence[int]) -> None:
        """Return when all members have arrived at `point`, a name that is used once. Raises MissingRankError.

        Makes three requests to the store and one wait, for any number of members.
        """
        self._set_action(point)
        self.store.set(f"at/{self._rank}", json.dumps([point, [*members]]))
        self.store.set(f"{point}/{self._rank}", "")
        if self.store.add(f"{point}/count", 1) == len(members):
            self.store.set(f"{point}/all", "")
        try:
            self.store.wait([f"{point}/all"], timedelta(seconds=self._timeout_s))
        except RuntimeError:  # includes the errors of the store
            if missing := self._missing(point, members, {point}):
                raise MissingRankError(missing, self._timeout_s, point) from None
            raise

    def _missing(self, point: str, members: Sequence[int], seen: set[str]) -> list[int]:
        """Return the ranks that block the others: the absent members, or, if one waits elsewhere, those it waits
        for."""
        absent = self._absent_ranks(point, members)
        for rank in absent:
            if self.store.check([f"at/{rank}"]):
                elsewhere, their_members = json.loads(self.store.get(f"at/{rank}"))
                if elsewhere not in seen and self._absent_ranks(elsewhere, their_members):
                    return self._missing(elsewhere, their_members, seen | {elsewhere})
        return absent

    def _absent_ranks(self, point: str, members: Sequence[int]) -> list[int]:
        return [rank for rank in members if not self.store.check([f"{point}/{rank}"])]


# --- A process group of torch.distributed that only its members create: gloo between processes, NCCL between GPUs
#
# `torch.distributed.new_group` names a group by the number of groups made so far, so all ranks must create all groups.
# A communicator has its own name in the store instead (docs/adr/0020-channels-are-opened-in-one-proven-order.md).


class Communicator:
    """One channel. Peers are world ranks; tensors are contiguous."""

    def __init__(
        self, channel: Channel, rank: int, meeting: Meeting, start_timeout_s: float, timeout_s: float, ctas: int = 0
    ) -> None:
        """Wait for the members, `start_timeout_s` at most (else MissingRankError). Later calls wait `timeout_s`.

        `ctas`: thread blocks that NCCL may use for it; 0 for the default of NCCL.
        """
        self.kind, self.members = channel
        self.rank, self.name, self.ctas = rank, name_of(channel), ctas
        self.carrier: Carrier = "nccl" if dist.get_backend() == "nccl" else "gloo"
        meeting.arrive(f"connect {self.name}", self.members)
        self._group = self._make(meeting, start_timeout_s, timeout_s)

    def _make(self, meeting: Meeting, start_timeout_s: float, timeout_s: float) -> Any:
        if self.kind == "world":
            return dist.group.WORLD
        place = dist.PrefixStore(self.name, meeting.store), self.index_of(self.rank), len(self.members)
        if self.carrier == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            options.group_name = self.name  # type: ignore[assignment]  # a str subclass
            if self.ctas:
                options.config.max_ctas = self.ctas
            return dist.ProcessGroupNCCL(*place, options)
        group = dist.ProcessGroupGloo(*place, timedelta(seconds=start_timeout_s))  # connects immediately
        group._set_default_timeout(timedelta(seconds=timeout_s))
        return group

    def index_of(self, rank: int) -> int:
        """Return the index of a world rank among the members."""
        return self.members.index(rank)

    def greet(self, device: torch.device) -> None:
        """Test the channel the way it will be used. ChannelError if another rank is at the other end."""
        stamp = digest(self.name)
        mine = torch.tensor([self.rank, stamp], device=device)
        size = len(self.members)
        theirs = torch.zeros(size, 2, dtype=mine.dtype, device=device)
        if self.kind == "edge":
            self._greet_peer(mine, theirs)
        elif self.kind in get_args(SwapKind):
            row_counts = (1,) * size
            self.all_to_all(theirs, mine.expand(size, 2).contiguous(), row_counts, row_counts).wait()
        else:
            self.all_gather(list(theirs), mine)
            self.all_reduce(torch.ones(1, device=device)).wait()
        if theirs.tolist() != [[member, stamp] for member in self.members]:
            raise ChannelError(f"connect {self.name}: other ranks than these answer: {theirs.tolist()}")

    def _greet_peer(self, mine: Tensor, theirs: Tensor) -> None:
        """Send a message along the edge, and one back."""
        own_index = self.index_of(self.rank)
        theirs[own_index], peer = mine, self.members[1 - own_index]
        answer = torch.zeros_like(mine)
        for sends in (own_index == 0, own_index == 1):
            (self.send(mine, peer) if sends else self.receive(answer, peer)).wait()
        theirs[1 - own_index] = answer

    # ---- operations of channels

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Start to send a tensor."""
        return _work(self._group.send([tensor], self.index_of(peer), 0))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """Start to receive into a tensor."""
        return _work(self._group.recv([tensor], self.index_of(peer), 0))

    def all_to_all(self, room: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]) -> Work:
        """Start an all-to-all from `sent` to `room`. `outgoing`, `incoming`: rows to and from each member."""
        return _work(self._group.alltoall_base(room, sent, list(incoming), list(outgoing)))

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Work:
        """Start an all-reduce over the members: the sum, or with `largest` the maximum of each element."""
        return _work(self._group.allreduce([tensor], dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM))

    def reduce_scatter(self, mine: Tensor, tensor: Tensor) -> Work:
        """Start a reduce-scatter of `tensor` in equal parts. `mine` may be one of them. NCCL only."""
        return _work(self._group._reduce_scatter_base(mine, tensor))

    def reduce_to_owners(self, parts: Sequence[tuple[Tensor, int]]) -> Work:
        """Start to sum each part to one member, given by its index, in one launch. NCCL only."""
        self._group._start_coalescing()
        for part, owner in parts:
            self._group.reduce(part, owner)
        return _work(self._group._end_coalescing())

    def all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        """All-gather `mine` into `rows`, one per member."""
        self.start_all_gather(rows, mine).wait()

    def start_all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> Work:
        """Start an all-gather of `mine` into `rows`. `mine` may be one of the rows."""
        return _work(self._group.allgather([list(rows)], [mine]))

    def start_flat_gather(self, tensor: Tensor, mine: Tensor) -> Work:
        """Start an all-gather into a flat tensor. `mine` may be the part of this member in `tensor`."""
        return _work(self._group._allgather_base(tensor, mine))


def name_of(channel: Channel) -> str:
    """Return the kind and the ranks of a channel: edge 3>4, expert 0-63, reduce 0-127, 1920-2047."""
    kind, ranks = channel
    if kind == "edge":
        return f"{kind} {'>'.join(map(str, ranks))}"
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    runs = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"{kind} {', '.join(runs)}"


def _work(work: Work | None) -> Work:
    assert work is not None, "this rank is not a member of the group"
    return work


# --- Sums over gloo in the order of ranks: they are bit-identical to sums over shared memory
#
# Gloo itself sums in the order of a ring. So a rank receives its share from all holders, and adds them here.


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
        communicator = self.communicators[Channel("reduce", holders)]
        if len(holders) == 2 and not shares:
            return communicator.all_reduce(flat)  # a + b is b + a
        parts = _parts(flat, shares or equal_shares(flat.numel(), len(holders)))
        own_index = communicator.index_of(communicator.rank)
        rows = [
            parts[own_index] if index == own_index else [part.new_empty(part.shape) for part in parts[own_index]]
            for index in range(len(parts))
        ]
        return _PartSums(communicator, _exchange(communicator, parts, rows), parts, rows, for_all=not shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        _take(self.communicators[Channel("reduce", holders)], _parts(flat, shares))


@dataclass(frozen=True)
class _PartSums:
    """A pending reduce: this rank's share of each holder's tensor arrives in `rows`."""

    communicator: Communicator
    works: Sequence[Work]
    parts: Sequence[Sequence[Tensor]]
    rows: Sequence[Sequence[Tensor]]
    for_all: bool  # whether each holder needs the sums of all parts

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        mine = self.parts[self.communicator.index_of(self.communicator.rank)]
        for part, *addends in zip(mine, *self.rows, strict=True):
            part.copy_(sum_in_order(addends))
        if self.for_all:
            _take(self.communicator, self.parts)


def _take(communicator: Communicator, parts: Sequence[Sequence[Tensor]]) -> None:
    """Send this rank's parts to each holder, and receive theirs."""
    mine = parts[communicator.index_of(communicator.rank)]
    for work in _exchange(communicator, [mine] * len(parts), parts):
        work.wait()


def _parts(flat: Tensor, shares: Shares) -> list[list[Tensor]]:
    """Return the non-empty parts of each holder."""
    return [[flat[part] for part in share if part.stop > part.start] for share in shares]


def _exchange(
    communicator: Communicator, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Tensor]]
) -> list[Work]:
    """Start to send each other member its `outgoing` tensors, and to receive its `incoming` ones in place."""
    indices = [index for index, member in enumerate(communicator.members) if member != communicator.rank]
    works = [
        communicator.receive(as_bytes(tensor), communicator.members[index])
        for index in indices
        for tensor in incoming[index]
    ]
    works += [
        communicator.send(as_bytes(tensor), communicator.members[index])
        for index in indices
        for tensor in outgoing[index]
    ]
    return works


@dataclass(frozen=True)
class GlooParts:
    communicator: Communicator

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> PendingReduceScatter:
        count = len(self.communicator.members)
        outgoing, row_counts = flat.view(count, -1), (1,) * count
        incoming = outgoing.new_empty(outgoing.shape) if room is flat else room.view(count, -1)
        work = self.communicator.all_to_all(as_bytes(incoming), as_bytes(outgoing), row_counts, row_counts)
        return PendingReduceScatter(
            [work], [*incoming], room.view(count, -1)[self.communicator.index_of(self.communicator.rank)]
        )

    def gather(self, name: str, flat: Tensor) -> Work:
        parts = flat.chunk(len(self.communicator.members))
        mine = parts[self.communicator.index_of(self.communicator.rank)]
        return self.communicator.start_all_gather([as_bytes(part) for part in parts], as_bytes(mine))


# --- collective


class CollectiveLinks:
    """The communicators of a rank, opened and tested in the same order on all ranks."""

    def __init__(self, communicators: Mapping[Channel, Communicator], checked: bool) -> None:
        self._by_channel, self._checked = communicators, checked
        self.carriers: Mapping[Channel, Carrier] = {
            channel: communicator.carrier for channel, communicator in communicators.items()
        }
        world = next(communicator for (kind, _), communicator in communicators.items() if kind == "world")
        self.sums: Sums = (NcclSums if world.carrier == "nccl" else GlooSums)(world, communicators)

    def edge(self, source: int, destination: int) -> CollectiveEdge:
        communicator = self._by_channel[Channel("edge", (source, destination))]
        peer = destination if source == communicator.rank else source
        return CollectiveEdge(communicator, peer, self._checked)

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        communicator = self._by_channel.get(Channel(kind, members))
        return CollectiveSwap(communicator) if communicator is not None else None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        communicator = self._by_channel[Channel(kind, members)]
        return (NcclParts if communicator.carrier == "nccl" else GlooParts)(communicator)

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None


@dataclass
class CollectiveEdge:
    """One direction between two ranks. In a checked run, the name and number of a message are sent before it."""

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
    """A received header, which names the message that follows."""

    work: Work
    header: Tensor
    expected: Tensor
    prefix: str  # of the error message

    def wait(self) -> None:
        self.work.wait()
        if not torch.equal(self.header, self.expected):
            raise ChannelError(f"{self.prefix} sent another message ({self.header.tolist()})")


@dataclass(frozen=True)
class CollectiveSwap:
    communicator: Communicator

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        sent, room = outgoing.to_contiguous(), incoming.room()
        work = self.communicator.all_to_all(as_bytes(room), as_bytes(sent), incoming.counts, outgoing.counts)
        return [work if room is incoming.tensor else _PendingUnpack(work, room, incoming)]


@dataclass(frozen=True)
class _PendingUnpack:
    """Rows that arrive member after member, and are copied to their places once all have arrived."""

    work: Work
    room: Tensor
    incoming: Rows

    def wait(self) -> None:
        self.work.wait()
        self.incoming.fill(Rows(self.room, self.incoming.counts))


@dataclass(frozen=True)
class NcclParts:
    communicator: Communicator

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> Work:
        return self.communicator.reduce_scatter(self._own_part(room), flat)  # in place if `flat` is the room

    def gather(self, name: str, flat: Tensor) -> Work:
        return self.communicator.start_flat_gather(flat, self._own_part(flat))  # in place

    def _own_part(self, flat: Tensor) -> Tensor:
        members = self.communicator.members
        return flat.chunk(len(members))[members.index(self.communicator.rank)]


@dataclass(frozen=True)
class NcclSums:
    world: Communicator
    communicators: Mapping[Channel, Communicator]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.world.all_reduce(tensor, largest).wait()

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        communicator = self.communicators[Channel("reduce", holders)]
        even = len({part.stop - part.start for share in shares for part in share}) == 1
        if even and all(len(share) == 1 for share in shares):
            (mine,) = shares[communicator.index_of(communicator.rank)]
            return communicator.reduce_scatter(flat[mine], flat)  # in place
        if not shares:
            return communicator.all_reduce(flat)
        # Shares of whole matrices are uneven. An all-reduce would move twice the bytes.
        return communicator.reduce_to_owners(
            [(flat[part], owner) for owner, share in enumerate(shares) for part in share if part.stop > part.start]
        )

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        communicator = self.communicators[Channel("reduce", holders)]
        index = communicator.index_of(communicator.rank)
        sizes = [sum(part.stop - part.start for part in share) for share in shares]
        rows = flat.new_empty(len(shares), max(sizes))  # the rest of each row is unused
        mine = flat.new_empty(max(sizes))
        torch.cat([flat[part] for part in shares[index]] or [flat[:0]], out=mine[: sizes[index]])
        communicator.all_gather([as_bytes(row) for row in rows], as_bytes(mine))
        for row, share, size in zip(rows, shares, sizes, strict=True):
            extents = [part.stop - part.start for part in share]
            for part, values in zip(share, row[:size].split(extents), strict=True):
                flat[part].copy_(values)
