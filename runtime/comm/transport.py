"""What a rank's channels are: pipeline messages, expert exchanges, sums. `connect` says what carries them.

One channel per ordered pair of pipeline ranks that talk, so that in-order delivery per direction is all that is asked
of it; two per expert group, one for rows and one for counts of rows, which so wait for no rows; one per set of holders.
Every exchange of counts carries its place in the group's order, and messages carry their names where that costs
nothing, or in a checked run: ends that disagree stop with an error instead of swapping data silently.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from runtime.comm.rows import Rows
from runtime.contract import Mesh, Opening

Channel = tuple[str, tuple[int, ...]]  # kind, as of an Opening, and world ranks: ("edge", (source, destination))
Carrier = Literal["memory", "gloo", "nccl"]  # of the messages of a channel
SwapKind = Literal["expert", "counts"]
PartsKind = Literal["reduce", "tensor", "context", "choices"]


class ChannelError(RuntimeError):
    """The two ends of a channel disagree about what is being exchanged."""


class Work(Protocol):
    """Something in flight."""

    def wait(self) -> object: ...


@dataclass
class Pending:
    """An operation in flight: what to wait for, what it gives, and what it must keep alive until then."""

    works: list[Work]
    result: Tensor
    keep: tuple[Tensor, ...] = ()

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        self.keep = ()
        return self.result


def digest(name: str) -> int:
    return zlib.crc32(name.encode())


class Edge(Protocol):
    """One direction between two pipeline ranks; in-order, so messages need no tags."""

    def send(self, name: str, tensor: Tensor) -> Pending: ...

    def post(self, name: str, buffer: Tensor) -> Pending:
        """Post a receive; waiting for it fills `buffer`. ChannelError: another message came."""
        ...


class Swap(Protocol):
    """All-to-all of one expert group: what is given to each member, and the places of what is taken from each."""

    def start(self, name: str, given: Rows, taken: Rows) -> list[Work]: ...


Shares = tuple[tuple[slice, ...], ...]  # parts of a flat tensor, without overlap: those of each of its holders


def equal_shares(elements: int, members: int) -> Shares:
    """Equal ranges of the elements, one for each member; the last may be shorter."""
    extent = -(-elements // members)
    return tuple((slice(min(r * extent, elements), min((r + 1) * extent, elements)),) for r in range(members))


def sum_in_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of tensors of one shape, two at least, from the first to the last: its bits depend on nothing else.

    `out`: where it is put; it may be one of the first two parts, and none of the others.
    """
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total


def largest_of(parts: Sequence[Tensor]) -> Tensor:
    """The largest of each of the numbers of tensors of one shape; NaN where one of them is."""
    return torch.stack([*parts]).amax(0)


class Sums(Protocol):
    """Collectives: over all ranks, and over the holders of a bucket. On CPUs sums are made in the order of ranks, so
    they have the same bits whatever carries them."""

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """Sum a small tensor over the world, or take the largest of each of its numbers."""
        ...

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        """Begin to sum a flat tensor over its holders, which is not to be touched until that was waited for. With
        `shares` each of them then has the sums of the parts that it owns, and nothing that is to be read in the others.

        Never waits for another rank. The holders of several tensors start these in one order, and wait in one order.
        """
        ...

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        """Fill a flat tensor from the parts that its holders own, `shares` of each of them."""
        ...


class Parts(Protocol):
    """Flat tensors of equal parts, one for each member of a channel. What is started runs while others compute."""

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> Work:
        """Start to sum `flat` over the members. In the end this one has the sums of its part in its place of `room`,
        which is as large; what is in the other places is not to be read. `room` may be `flat`, which else stays."""
        ...

    def gather(self, name: str, flat: Tensor) -> Work:
        """Start to fill `flat` with the parts of all members; that of this one is in its place."""
        ...


@dataclass(frozen=True)
class Wanted:
    """The channels of a world, in the order in which they are opened, and the flat tensors that are summed and gathered
    over holders. `parted`: the channels of flat tensors in equal parts, and the bytes of their largest part."""

    mesh: Mesh
    openings: tuple[Opening, ...]
    flats: Mapping[str, tuple[tuple[int, ...], int]]  # name → holders, bytes
    parted: Mapping[Channel, int] = field(default_factory=dict)

    def channels(self, rank: int) -> list[Channel]:
        """The channels that a rank is in, in the order in which it opens them."""
        found = [(opening.kind, opening.channel_of(self.mesh, rank)) for opening in self.openings]
        return [(kind, ranks) for kind, ranks in found if ranks is not None]

    def of(self, rank: int, kind: str) -> list[tuple[int, ...]]:
        """The channels of a kind that a rank is in."""
        return [ranks for each, ranks in self.channels(rank) if each == kind]


class Links(Protocol):
    """A rank's channels, connected."""

    sums: Sums
    carriers: Mapping[Channel, Carrier]  # of each channel of the rank

    def edge(self, source: int, destination: int) -> Edge: ...

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        """The swap of one expert group, for rows or for counts; None for a group of one."""
        ...

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        """The channel of holders that divide what they hold, or of a tensor or context group."""
        ...

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for a flat tensor, if it must lie in a certain place; zeros."""
        ...


class Alone:
    """The transport of a world of one rank, which has nobody to talk to."""

    class _Sums:
        def all_reduce(self, tensor: Tensor, largest: bool = False) -> None: ...

        def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
            raise ChannelError("a world of one rank has no sums")

        def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None: ...

    sums: Sums = _Sums()
    carriers: Mapping[Channel, Carrier] = {}

    def edge(self, source: int, destination: int) -> Edge:
        raise ChannelError("a world of one rank has no messages")

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        raise ChannelError("a world of one rank divides nothing")

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None
