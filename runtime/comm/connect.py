"""Opens the channels of a rank: on CPUs over shared memory if all members of a channel share it, else gloo; on GPUs
NCCL.

Ranks that share one GPU use the channels of CPUs and copy tensors to and from the host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.collective import CollectiveLinks, Communicator, Meeting, name_of
from runtime.comm.host import HostLinks, part_of, parts_of
from runtime.comm.memory import Address, SharedMemory, can_share, make_memory, map_memory
from runtime.comm.transport import (
    Carrier,
    Channel,
    ChannelError,
    Edge,
    Links,
    Parts,
    PartsKind,
    Pending,
    Rows,
    Shares,
    SingleRankLinks,
    Sums,
    Swap,
    SwapKind,
    WantedChannels,
    Work,
)
from runtime.contract.mesh import most_ctas
from runtime.contract.options import START_TIMEOUT_S

# --- Channels over several machines: over memory if all members are on one machine, else over gloo


class MixedLinks:
    """The channels of `host`, and those of `collective`, which include the world: some ranks share no memory."""

    def __init__(self, host: HostLinks, collective: CollectiveLinks) -> None:
        self._host, self._collective = host, collective
        self.carriers: Mapping[Channel, Carrier] = {**host.carriers, **collective.carriers}
        self.sums: Sums = MixedSums(host.sums, collective.sums, self.carriers)

    def edge(self, source: int, destination: int) -> Edge:
        return self._links("edge", (source, destination)).edge(source, destination)

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return self._links(kind, members).swap(kind, members)

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        return self._links(kind, members).parts(kind, members)

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return self._host.flat(name, elements, dtype)

    def _links(self, kind: str, ranks: tuple[int, ...]) -> HostLinks | CollectiveLinks:
        return self._host if Channel(kind, ranks) in self._host.carriers else self._collective


@dataclass(frozen=True)
class MixedSums:
    host: Sums
    collective: Sums
    carriers: Mapping[Channel, Carrier]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        self.collective.all_reduce(tensor, largest)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        return self._links(holders).start_reduce(bucket, holders, flat, shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self._links(holders).gather(bucket, holders, flat, shares)

    def _links(self, holders: tuple[int, ...]) -> Sums:
        return self.host if self.carriers[Channel("reduce", holders)] == "memory" else self.collective


# --- Channels of ranks that share a GPU: tensors go through the memory of the host
#
# NCCL needs a device for every rank. If several ranks share one, a tensor is copied to the host and sent over channels
# of the host (shared memory or gloo); a received tensor is copied to the device on `wait`. The same program runs, and
# sums are in the same order, at the speed of the host: this is for trying out a run of several ranks.


class StagedLinks:
    """Channels for device tensors, over the channels `host`."""

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
        return None  # the tensor is on the device; StagedSums makes its copy on the host


@dataclass(frozen=True)
class StagedEdge:
    host: Edge

    def send(self, name: str, tensor: Tensor) -> Pending:
        return self.host.send(name, tensor.cpu())

    def post(self, name: str, buffer: Tensor) -> Pending:
        staged = _empty_like(buffer)
        return Pending([_StagedArrival([self.host.post(name, staged)], staged, buffer)], buffer)


@dataclass(frozen=True)
class StagedSwap:
    host: Swap

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        sent, room = outgoing.to_contiguous().cpu(), incoming.room()
        staged = _empty_like(room)
        works = self.host.start(name, Rows(sent, outgoing.counts), Rows(staged, incoming.counts))
        return [_StagedArrival(works, staged, room, keep=sent, places=None if room is incoming.tensor else incoming)]


@dataclass(frozen=True)
class StagedParts:
    host: Parts

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> _StagedArrival:
        staged = flat.cpu()
        return _StagedArrival([self.host.scatter(name, staged, staged)], staged, room)

    def gather(self, name: str, flat: Tensor) -> _StagedArrival:
        staged = flat.cpu()
        return _StagedArrival([self.host.gather(name, staged)], staged, flat)


@dataclass(frozen=True)
class _StagedArrival:
    """A tensor that arrives on the host and is then copied to the device, and its rows to their `places`. `keep` stays
    alive until then."""

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
    """Sums of device tensors. Each flat tensor has one copy on the host, in memory that the host channels choose."""

    host: Links
    copies: dict[str, Tensor] = field(default_factory=dict)

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        staged = tensor.cpu()
        self.host.sums.all_reduce(staged, largest)
        tensor.copy_(staged)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        staged = self._copy_of(bucket, flat)
        staged.copy_(flat)
        return _StagedArrival([self.host.sums.start_reduce(bucket, holders, staged, shares)], staged, flat)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        staged = self._copy_of(bucket, flat)
        staged.copy_(flat)
        self.host.sums.gather(bucket, holders, staged, shares)
        flat.copy_(staged)

    def _copy_of(self, bucket: str, flat: Tensor) -> Tensor:
        if bucket not in self.copies:
            placed = self.host.flat(bucket, flat.numel(), flat.dtype)
            self.copies[bucket] = _empty_like(flat) if placed is None else placed
        return self.copies[bucket]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


# --- connect

Transport = Literal["auto", "memory", "gloo"]  # gloo: torch.distributed, NCCL on GPUs
CARRIERS: tuple[Carrier, ...] = get_args(Carrier)
CPU = torch.device("cpu")
PEER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Endpoint:
    """A rank's end of all channels: the device of its tensors, and how it connects to its peers.

    `timeout_s`: how long it waits for a peer; `start_timeout_s`: how long for all peers at the start. `checked`: every
    message is verified (tests). `sms`: SMs of a device for communication; 0 for the default of NCCL.
    """

    device: torch.device = CPU
    transport: Transport = "auto"
    timeout_s: float = PEER_TIMEOUT_S
    checked: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    sms: int = 0

    def connect(self, rank: int, wanted: WantedChannels, set_action: Callable[[str], None] = lambda _: None) -> Links:
        """Open the channels of `rank`, in the same order on all ranks. `set_action` is called with each channel's name.

        Raises MissingRankError if a rank does not arrive; ChannelError if a wrong rank is at the end of a channel;
        OSError if the transport `memory` was requested and ranks do not share memory.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return SingleRankLinks()
        meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, self.start_timeout_s, set_action)
        meeting.arrive("connect", range(dist.get_world_size()))
        staged = (
            self.device.type != "cpu" and dist.get_backend() == "gloo"
        )  # ranks share a device: runtime/observe/device.py
        if not staged and self.device.type != "cpu":
            return self._collective_links(rank, wanted.channels(rank), meeting, self.device)
        links = self._host_links(rank, wanted, meeting)
        return StagedLinks(links) if staged else links

    def _collective_links(
        self, rank: int, channels: Sequence[Channel], meeting: Meeting, device: torch.device
    ) -> CollectiveLinks:
        communicators: dict[Channel, Communicator] = {}
        hops = max(1, sum(kind == "expert" for kind, _ in channels))
        for channel in channels:
            ctas = most_ctas(channel.kind, self.sms, hops)
            communicators[channel] = Communicator(channel, rank, meeting, self.start_timeout_s, self.timeout_s, ctas)
            communicators[channel].greet(device)
        return CollectiveLinks(communicators, self.checked)

    def _host_links(self, rank: int, wanted: WantedChannels, meeting: Meeting) -> Links:
        channels = wanted.channels(rank)
        if self.transport == "gloo":
            return self._collective_links(rank, channels, meeting, CPU)
        sharing = share(rank, wanted)
        if self.transport == "memory" and sharing.problem:
            raise OSError(f"ranks cannot share memory: {sharing.problem}")
        shared = [channel for channel in channels if sharing.carries(channel)]
        _check_ends(rank, shared, sharing.addresses)
        host = HostLinks(rank, shared, wanted.flats, sharing.memories, self.timeout_s)
        if len(shared) == len(channels):
            return host
        unshared = [channel for channel in channels if channel not in shared]
        return MixedLinks(host, self._collective_links(rank, unshared, meeting, CPU))


def transport_in_use(links: Links) -> str:
    """Return the carriers of a rank's messages: "memory", "gloo", "memory and gloo", "nccl", or "none" in a world of
    one."""
    return " and ".join(channels_of(links)) or "none"


def channels_of(links: Links) -> dict[Carrier, list[str]]:
    """Return the names of the channels of a rank, by carrier."""
    by_carrier = {
        carrier: [name_of(channel) for channel, channel_carrier in links.carriers.items() if channel_carrier == carrier]
        for carrier in CARRIERS
    }
    return {carrier: names for carrier, names in by_carrier.items() if names}


# ---------------------------------------------------------------- which ranks share memory
@dataclass(frozen=True)
class MappedMemories:
    """The memories that a rank has mapped, and which memories each rank has `mapped`, which is equal on all ranks."""

    memories: Mapping[int, SharedMemory]
    addresses: Mapping[int, Address]
    mapped: Sequence[frozenset[int]]  # by rank
    problem: str  # why a rank could not map another's memory; "" if all could

    def carries(self, channel: Channel) -> bool:
        """Whether every member of a channel has mapped the memory of every other."""
        members = frozenset(channel.ranks)
        return all(members <= self.mapped[rank] for rank in members)


def share(rank: int, wanted: WantedChannels) -> MappedMemories:
    """Create the shared memory of this rank, and map the memory of the other ranks if possible. All ranks call this
    together.

    The memory of a rank on another machine cannot be mapped, nor memory that this process may not open. Every rank
    learns what the others have mapped, so the ends of a channel agree on its carrier.
    """
    memories, problems, address = dict[int, SharedMemory](), list[str](), None
    try:
        if not can_share():
            raise OSError("this processor does not guarantee the order of stores, or this system has no memory files")
        memories[rank], address = make_memory(parts_of(rank, wanted))
    except OSError as error:
        problems.append(f"rank {rank}: {error}")
    texts = _tell_all(json.dumps(asdict(address)) if address else "")
    addresses = {peer: Address(**json.loads(text)) for peer, text in enumerate(texts) if text}
    for peer in (addresses.keys() if address else set()) - {rank}:
        try:
            memories[peer] = map_memory(addresses[peer])
        except OSError as error:
            problems.append(f"rank {rank} cannot map the memory of rank {peer}: {error}")
    reports = [json.loads(text) for text in _tell_all(json.dumps([sorted(memories), *problems[:1]]))]
    if address:
        os.close(address.descriptor)  # every rank that can map it has done so
    return MappedMemories(
        memories,
        addresses,
        [frozenset(ranks) for ranks, *_ in reports],
        next((p for _, *ps in reports for p in ps), ""),
    )


def _check_ends(rank: int, channels: Sequence[Channel], addresses: Mapping[int, Address]) -> None:
    """Raise ChannelError unless the memory of each rank has the parts that this rank reads and writes there."""
    for channel in channels:
        for peer in channel.ranks:
            theirs = part_of(channel, peer, rank)
            if peer != rank and theirs is not None and theirs not in addresses[peer].parts:
                raise ChannelError(f"connect {name_of(channel)}: rank {peer} has no {theirs!r}")


def _tell_all(text: str) -> list[str]:
    """Return the texts of all ranks, on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    longest = torch.tensor(data.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
    mine[: data.numel()] = data
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return [bytes(padded.tolist()).decode().strip() for padded in all_of_them]
