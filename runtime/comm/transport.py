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
from functools import cached_property
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from runtime.contract import Mesh, Opening

# --- Where the rows of an exchange lie: member after member, or with the rank that receives them, expert after expert
#
# Of source 0 two rows for expert a and one for b, of source 1 one for a and two for b, padded to multiples of 4:
#
#     a0 a0 a1 ·  b0 b1 b1 ·
#
# So the rows of an expert are one piece of the tensor, which a product takes whole. Padding is rows of zeros. It is
# made where it lies, and never sent.


@dataclass(frozen=True)
class RowLayout:
    """The rows that an expert rank receives: expert after expert, of each expert source after source, then padding to a
    multiple of `alignment` rows."""

    counts: tuple[tuple[int, ...], ...]  # [source][local expert]
    alignment: int = 1

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each piece: of each expert, those of each source and those of padding."""
        found: list[int] = []
        for from_sources in zip(*self.counts, strict=True):
            found += [*from_sources, -sum(from_sources) % self.alignment]
        return found

    @cached_property
    def ends(self) -> list[int]:
        """Where the rows of each expert end, behind their padding."""
        return list(accumulate(self.sizes))[len(self.counts) :: len(self.counts) + 1]

    @property
    def num_rows(self) -> int:
        """Rows of the tensor, R, padding among them."""
        return self.ends[-1]

    @property
    def of_sources(self) -> tuple[int, ...]:
        """Rows that each source sends."""
        return tuple(map(sum, self.counts))

    def empty(self, like: Tensor) -> Tensor:
        """A tensor for rows as those of `like`. Padding is zero, the other rows are yet to come."""
        tensor = empty_rows(like, self.num_rows)
        padding = tensor.split(self.sizes)[len(self.counts) :: len(self.counts) + 1]
        torch._foreach_zero_([raw(rows) for rows in padding])
        return tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that go to, or come from, each member of an expert group: [rows, …], of any dtype."""

    tensor: Tensor
    counts: tuple[int, ...]  # of each member
    layout: RowLayout | None = None  # None: they lie member after member
    sources: tuple[tuple[int, ...], ...] = ()  # of a layout, that each member brings or takes; (): itself

    def pieces(self) -> list[Sequence[Tensor]]:
        """The rows of each member, as views."""
        if self.layout is None:
            return [(rows,) for rows in self.tensor.split(self.counts)]
        pieces, step = self.tensor.split(self.layout.sizes), len(self.layout.counts) + 1
        sources = self.sources or [(member,) for member in range(len(self.counts))]
        return [[piece for source in each for piece in pieces[source::step]] for each in sources]

    def packed(self) -> Tensor:
        """The rows in a contiguous tensor, member after member: moved, unless they lie so."""
        if self.layout is None:
            return self.tensor.contiguous()
        packed = self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])
        Rows(packed, self.counts).fill(self)
        return packed

    def room(self) -> Tensor:
        """A contiguous tensor for the rows, member after member: this one, if they lie so here."""
        if self.layout is None and self.tensor.is_contiguous():
            return self.tensor
        return self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])

    def fill(self, source: Rows) -> None:
        """Copy the rows of `source`, of as many for each member, to their places."""
        to: list[Tensor] = []
        rows: list[Tensor] = []
        for mine, theirs in zip(self.pieces(), source.pieces(), strict=True):
            to += _cut_as(theirs, mine)
            rows += _cut_as(mine, theirs)
        torch._foreach_copy_(to, rows)


def copy_rows(to: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy pieces of rows to their places, in this order. One side may be a single piece, where they lie together."""
    torch._foreach_copy_([*_cut_as(rows, to)], [*_cut_as(to, rows)])


def _cut_as(others: Sequence[Tensor], pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The pieces; if they are one, and others several, cut as those are."""
    if len(pieces) == len(others):
        found = pieces
    else:
        found = pieces[0].split([len(each) for each in others]) if len(pieces) == 1 else pieces
    return [raw(piece) for piece in found]


def raw(tensor: Tensor) -> Tensor:
    """A tensor that is moved and not computed with, as bytes where an element is one."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor that is moved and not computed with, as bytes where gloo does not know the dtype. Rows stay rows."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else raw(tensor)


def empty_rows(like: Tensor, num_rows: int) -> Tensor:
    """A tensor of so many rows as those of `like`, that lies column by column if `like` does."""
    if like.dim() == 2 and like.shape[1] > 1 and like.stride(0) == 1:
        return like.new_empty(like.shape[1], num_rows).t()
    return like.new_empty(num_rows, *like.shape[1:])


# --- transport

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
class WantedChannels:
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

    class _SumsAlone:
        def all_reduce(self, tensor: Tensor, largest: bool = False) -> None: ...

        def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
            raise ChannelError("a world of one rank has no sums")

        def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None: ...

    sums: Sums = _SumsAlone()
    carriers: Mapping[Channel, Carrier] = {}

    def edge(self, source: int, destination: int) -> Edge:
        raise ChannelError("a world of one rank has no messages")

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        raise ChannelError("a world of one rank divides nothing")

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None


# --- Flat tensors of equal parts, one for each holder: sums of which each has its part, and what all put together
#
# Both run while others compute. Parts are summed in the order of the holders, as those of a whole bucket are, so that
# all transports but NCCL give the same bits.

BLOCK = 1 << 15  # elements of more than two tensors summed at a time, so that the sum stays in the cache


@dataclass(frozen=True)
class Summed:
    """What is in flight are the parts that holders have of this one's place; their sum goes to the part `out`."""

    works: Sequence[Work]
    parts: Sequence[Tensor]  # in the order of the holders
    out: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        sum_parts(self.parts, self.out)


@dataclass(frozen=True)
class All:
    """Several things in flight, as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum flat tensors of one size, in their order. `out` may be one of them."""
    size = BLOCK if len(parts) > 2 else max(1, out.numel())
    is_read_late = any(out.data_ptr() == part.data_ptr() for part in parts[2:])  # after the first two were summed
    for at in range(0, out.numel(), size):
        block = slice(at, at + size)
        place = out[block]
        total = sum_in_order([part[block] for part in parts], None if is_read_late else place)
        if is_read_late:
            place.copy_(total)
