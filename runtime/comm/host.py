"""Channels over memory that ranks of one machine share (memory.py): two to twenty times as fast as gloo."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from runtime.comm.memory import CIRCLE_BYTES, PIPE_BYTES, Circle, PipeReader, PipeWriter, SharedMemory, pipe_bytes
from runtime.comm.transport import (
    AllWork,
    Carrier,
    Channel,
    ChannelError,
    PartsKind,
    Pending,
    PendingReduceScatter,
    Rows,
    Shares,
    Sums,
    Swap,
    SwapKind,
    WantedChannels,
    Work,
    copy_rows,
    digest,
)


def parts_of(rank: int, wanted: WantedChannels) -> dict[str, int]:
    """Return the parts of a rank's memory and their bytes: pipes that it writes to, circles, and flat tensors."""
    pipes = [f"edge {ranks}" for ranks in wanted.member_ranks(rank, "edge") if ranks[0] == rank]
    swaps = [
        f"{kind} {rank}>{peer}"
        for kind in get_args(SwapKind)
        for ranks in wanted.member_ranks(rank, kind)
        for peer in ranks
        if peer != rank
    ]
    of_parts = {
        f"{kind} {ranks} {rank}>{peer}": pipe_bytes(size)
        for (kind, ranks), size in wanted.parted.items()
        for peer in ranks
        if rank in ranks and peer != rank
    }
    circles = ["world", *(f"reduce {ranks}" for ranks in wanted.member_ranks(rank, "reduce"))]
    flats = {name: size for name, (holders, size) in wanted.flats.items() if rank in holders}
    return dict.fromkeys((*pipes, *swaps), PIPE_BYTES) | of_parts | dict.fromkeys(circles, CIRCLE_BYTES) | flats


def part_of(channel: Channel, peer: int, rank: int) -> str | None:
    """Return the part of another rank's memory that a channel with `rank` uses; None if there is none."""
    kind, ranks = channel
    if kind == "edge":
        return f"edge {ranks}" if peer == ranks[0] else None
    if kind in get_args(SwapKind):
        return f"{kind} {peer}>{rank}"
    if kind in ("tensor", "context", "choices"):
        return f"{kind} {ranks} {peer}>{rank}"
    return f"reduce {ranks}" if kind == "reduce" else "world"


class HostLinks:
    """The channels of a rank over the memories of ranks on its machine."""

    def __init__(
        self,
        rank: int,
        channels: Collection[Channel],
        flats: Mapping[str, tuple[tuple[int, ...], int]],
        memories: Mapping[int, SharedMemory],
        timeout_s: float,
    ) -> None:
        """`memories`: of the members of `channels`, by rank. `flats`: as in WantedChannels."""
        self._rank, self._memories, self._timeout_s, self._flats = rank, memories, timeout_s, flats
        self.carriers: Mapping[Channel, Carrier] = dict.fromkeys(channels, "memory")

        def circle(channel: Channel) -> Circle:
            part, ranks = part_of(channel, rank, rank), channel.ranks
            assert part is not None
            return Circle([memories[m] for m in ranks], ranks.index(rank), part, timeout_s)

        self.sums: Sums = HostSums(
            {channel: circle(channel) for channel in channels if channel[0] in ("reduce", "world")}
        )

    def edge(self, source: int, destination: int) -> HostEdge:
        part = f"edge {(source, destination)}"
        if source == self._rank:
            return HostEdge(PipeWriter(self._memories[source], part, self._timeout_s), None)
        return HostEdge(None, PipeReader(self._memories[source], part, self._timeout_s))

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return HostSwap(*self._pipes(kind, members)) if len(members) > 1 else None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> HostParts:
        return HostParts(*self._pipes(f"{kind} {members}", members))

    def _pipes(
        self, part: str, members: tuple[int, ...]
    ) -> tuple[int, list[PipeWriter | None], list[PipeReader | None]]:
        """Return this rank's index among members, and its pipes to and from each of the others."""
        rank, memories, timeout_s = self._rank, self._memories, self._timeout_s
        return (
            members.index(rank),
            [PipeWriter(memories[rank], f"{part} {rank}>{m}", timeout_s) if m != rank else None for m in members],
            [PipeReader(memories[m], f"{part} {m}>{rank}", timeout_s) if m != rank else None for m in members],
        )

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        if name not in self._flats or ("reduce", self._flats[name][0]) not in self.carriers:
            return None
        return self._memories[self._rank].tensor(name, elements, dtype)


@dataclass
class HostEdge:
    """One end of a pipe."""

    writer: PipeWriter | None
    reader: PipeReader | None
    sequence: int = 0

    def send(self, name: str, tensor: Tensor) -> Pending:
        assert self.writer is not None
        self.writer.write([tensor], digest(name))
        return Pending([], tensor)

    def post(self, name: str, buffer: Tensor) -> Pending:
        assert self.reader is not None
        self.sequence += 1
        return Pending([Arrival(self.reader, self.sequence - 1, (buffer,), name)], buffer)


@dataclass(frozen=True)
class Arrival:
    """A message that will arrive in a pipe."""

    reader: PipeReader
    message: int
    places: Sequence[Tensor]
    name: str

    def wait(self) -> None:
        stamp = self.reader.read(self.message, self.places, f"recv {self.name}")
        if stamp != digest(self.name):
            raise ChannelError(f"recv {self.name}: another message was sent ({stamp})")


@dataclass
class HostSwap:
    """Pipes to and from each member of an expert group. Received rows are copied from the pipe to their places; rows of
    this rank to itself are copied immediately."""

    index: int
    writers: Sequence[PipeWriter | None]
    readers: Sequence[PipeReader | None]
    sequence: int = 0

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]:
        parts, places = outgoing.pieces(), incoming.pieces()
        for writer, pieces in zip(self.writers, parts, strict=True):
            if writer is not None:
                writer.write(pieces, digest(name))
        copy_rows(places[self.index], parts[self.index])
        self.sequence += 1
        return [
            Arrival(reader, self.sequence - 1, place, name)
            for reader, place in zip(self.readers, places, strict=True)
            if reader is not None
        ]


@dataclass
class HostParts:
    """Pipes to and from each member of a channel. Parts are copied from a pipe to their places."""

    index: int
    writers: Sequence[PipeWriter | None]
    readers: Sequence[PipeReader | None]
    sequence: int = 0

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> PendingReduceScatter:
        outgoing, places = (buffer.chunk(len(self.writers)) for buffer in (flat, room))
        works = self._start_parts(name, outgoing, places)
        return PendingReduceScatter(
            works, [*places[: self.index], outgoing[self.index], *places[self.index + 1 :]], places[self.index]
        )

    def gather(self, name: str, flat: Tensor) -> AllWork:
        parts = flat.chunk(len(self.writers))
        return AllWork(self._start_parts(name, [parts[self.index]] * len(parts), parts))

    def _start_parts(self, name: str, outgoing: Sequence[Tensor], places: Sequence[Tensor]) -> list[Work]:
        """Send each other member its part, and start to receive one from each into its place."""
        for writer, part in zip(self.writers, outgoing, strict=True):
            if writer is not None:
                writer.write([part], digest(name))
        self.sequence += 1
        return [
            Arrival(reader, self.sequence - 1, (place,), name)
            for reader, place in zip(self.readers, places, strict=True)
            if reader is not None
        ]


@dataclass(frozen=True)
class HostSums:
    circles: Mapping[Channel, Circle]

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        (world,) = (circle for (kind, _), circle in self.circles.items() if kind == "world")
        world.all_reduce(tensor, largest)

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        return self.circles[Channel("reduce", holders)].start_reduce(bucket, flat.numel(), flat.dtype, shares)

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        self.circles[Channel("reduce", holders)].gather_parts(bucket, flat.numel(), flat.dtype, shares)
