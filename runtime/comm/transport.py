"""Interfaces of a rank's channels: pipeline messages, expert exchanges, sums. connect.py chooses their carriers.

There is one channel per ordered pair of pipeline ranks that communicate, so it only needs in-order delivery; two per
expert group, for rows and for counts of rows, so that counts do not wait for rows; and one per set of holders. Every
exchange of counts carries its number in the group, and messages carry their names if that is free, or in a checked run:
ends that disagree stop with an error instead of swapping data silently.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from runtime.contract import Mesh, Opening

# --- Layouts of the rows of an exchange: member after member, or on the receiving rank expert after expert
#
# Source 0 sends two rows for expert a and one for b, source 1 one for a and two for b, padded to multiples of 4:
#
#     a0 a0 a1 ·  b0 b1 b1 ·
#
# So the rows of an expert are contiguous, as a matrix product needs them. Padding is rows of zeros, which the receiver
# writes; it is never sent.


@dataclass(frozen=True)
class RowLayout:
    """The layout of the rows that an expert rank receives: expert after expert, within an expert source after source,
    then padding to a multiple of `alignment` rows."""

    counts: tuple[tuple[int, ...], ...]  # [source][local expert]
    alignment: int = 1
    members: tuple[tuple[int, ...], ...] = ()  # sources whose rows each member of the exchange passes on; (): its own
    # By device, the places of `places` and of padding. All tensors of an exchange and of its way back share them.
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each piece: for each expert, the rows from each source, then the padding."""
        pieces: list[int] = []
        for from_sources in zip(*self.counts, strict=True):
            pieces += [*from_sources, -sum(from_sources) % self.alignment]
        return pieces

    @cached_property
    def ends(self) -> list[int]:
        """End of the rows of each expert, including padding."""
        return list(accumulate(self.sizes))[len(self.counts) :: len(self.counts) + 1]

    @property
    def num_rows(self) -> int:
        """R: rows of the tensor, including padding."""
        return self.ends[-1]

    @cached_property
    def of_members(self) -> tuple[int, ...]:
        """Rows that come from each member."""
        return tuple(sum(sum(self.counts[source]) for source in member) for member in self.sources_by_member)

    @property
    def sources_by_member(self) -> tuple[tuple[int, ...], ...]:
        """The sources of each member."""
        return self.members or tuple((source,) for source in range(len(self.counts)))

    def empty(self, like: Tensor) -> Tensor:
        """Allocate a tensor for rows like those of `like`. Padding is zero, other rows are uninitialised."""
        tensor = empty_rows(like, self.num_rows)
        if tensor.device.type != "cpu":
            if self.num_rows > sum(self.of_members):
                raw(tensor).index_fill_(0, self._table(tensor.device)[1], 0)
        else:
            padding = tensor.split(self.sizes)[len(self.counts) :: len(self.counts) + 1]
            torch._foreach_zero_([raw(rows) for rows in padding])
        return tensor

    def places(self, device: torch.device) -> Tensor:
        """Return the place of each row, member after member (int64). The host does not wait for the device."""
        return self._table(device)[0]

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._tables:
            step = len(self.counts) + 1
            sources = [source for member in self.sources_by_member for source in member]
            pieces = [piece for first in (*sources, step - 1) for piece in range(first, len(self.sizes), step)]
            sizes, starts = [self.sizes[piece] for piece in pieces], [0, *accumulate(self.sizes)]
            ends = [*accumulate(sizes)]
            shifts = [starts[piece] + size - end for piece, size, end in zip(pieces, sizes, ends, strict=True)]
            numbers = torch.empty(2, len(pieces), dtype=torch.int64, pin_memory=True).copy_(
                torch.tensor([ends, shifts])
            )
            ends_P, shifts_P = torch.empty_like(numbers, device=device).copy_(numbers, non_blocking=True)
            row = torch.arange(self.num_rows, device=device)
            table = row + shifts_P.index_select(0, torch.searchsorted(ends_P, row, right=True))
            num_sent = sum(self.of_members)
            self._tables[device] = table[:num_sent], table[num_sent:]
        return self._tables[device]


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor that go to, or come from, each member of an expert group: [rows, …], of any dtype."""

    tensor: Tensor
    counts: tuple[int, ...]  # of each member
    layout: RowLayout | None = None  # None: rows are ordered member after member

    def pieces(self) -> list[Sequence[Tensor]]:
        """Return the rows of each member, as views."""
        if self.layout is None:
            return [(rows,) for rows in self.tensor.split(self.counts)]
        pieces, step = self.tensor.split(self.layout.sizes), len(self.layout.counts) + 1
        return [
            [piece for source in sources for piece in pieces[source::step]] for sources in self.layout.sources_by_member
        ]

    def to_contiguous(self) -> Tensor:
        """Return the rows in a contiguous tensor, member after member; copied only if the layout differs."""
        if self.layout is None:
            return self.tensor.contiguous()
        if self.tensor.device.type != "cpu":
            return select_rows(self.tensor, self.layout.places(self.tensor.device))
        packed = self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])
        Rows(packed, self.counts).fill(self)
        return packed

    def room(self) -> Tensor:
        """Return a contiguous buffer for the rows, member after member: this tensor, if it has that layout."""
        if self.layout is None and self.tensor.is_contiguous():
            return self.tensor
        return self.tensor.new_empty(sum(self.counts), *self.tensor.shape[1:])

    def fill(self, source: Rows) -> None:
        """Copy the rows of `source`, which has as many for each member, to their places.

        A device moves all rows in one launch: there may be hundreds of pieces of a few rows."""
        if self.tensor.device.type == "cpu":
            targets: list[Tensor] = []
            rows: list[Tensor] = []
            for mine, theirs in zip(self.pieces(), source.pieces(), strict=True):
                targets += _split_like(theirs, mine)
                rows += _split_like(mine, theirs)
            torch._foreach_copy_(targets, rows)
        elif self.layout is None:
            self.tensor.copy_(source.to_contiguous())
        else:
            target, words = as_words(self.tensor, source.to_contiguous())
            target.index_copy_(0, self.layout.places(self.tensor.device), words)


def copy_rows(targets: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    """Copy pieces of rows to their places, in order. One side may be a single contiguous piece."""
    torch._foreach_copy_([*_split_like(rows, targets)], [*_split_like(targets, rows)])


def _split_like(counterparts: Sequence[Tensor], pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the pieces. A single piece is split like the others."""
    if len(pieces) == len(counterparts):
        cut = pieces
    else:
        cut = pieces[0].split([len(part) for part in counterparts]) if len(pieces) == 1 else pieces
    return [raw(piece) for piece in cut]


def raw(tensor: Tensor) -> Tensor:
    """View a tensor for copying: as uint8 if its elements have one byte."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """View tensors of one dtype for moving their rows: as int64 if that divides the rows of all, else as in `raw`. A
    thread of a device moves one element at a time, so wide elements take fewer."""
    if all(_has_words(tensor) for tensor in tensors):
        return tuple(tensor.view(torch.int64) for tensor in tensors)
    return tuple(map(raw, tensors))


def _has_words(tensor: Tensor) -> bool:
    """Whether rows are contiguous, and begin and end at whole words of eight bytes."""
    size = tensor.dtype.itemsize
    starts, width = tensor.storage_offset() * size, tensor.shape[-1] * size
    return tensor.dim() > 1 and tensor.is_contiguous() and starts % 8 == 0 and width % 8 == 0


def select_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a tensor at `index`, contiguous."""
    (words,) = as_words(tensor)
    return words.index_select(0, index).view(tensor.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor for communication: as uint8 if gloo does not support the dtype. Rows stay rows."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else raw(tensor)


def empty_rows(like: Tensor, num_rows: int) -> Tensor:
    """Allocate `num_rows` rows like those of `like`, column-major if `like` is."""
    if like.dim() == 2 and like.shape[1] > 1 and like.stride(0) == 1:
        return like.new_empty(like.shape[1], num_rows).t()
    return like.new_empty(num_rows, *like.shape[1:])


# --- transport


class Channel(NamedTuple):
    """A channel between ranks: ("edge", (source, destination)). `kind`: as in `Opening`; `ranks`: world ranks."""

    kind: str
    ranks: tuple[int, ...]


Carrier = Literal["memory", "gloo", "nccl"]  # of the messages of a channel
SwapKind = Literal["expert", "counts"]
PartsKind = Literal["reduce", "tensor", "context", "choices"]


class ChannelError(RuntimeError):
    """The two ends of a channel disagree about what is being exchanged."""


class Work(Protocol):
    """An operation in flight."""

    def wait(self) -> object: ...


@dataclass
class Pending:
    """An operation in flight: the works to wait for, the result, and tensors to keep alive until then."""

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
    """One direction between two pipeline ranks. Delivery is in order, so messages need no tags."""

    def send(self, name: str, tensor: Tensor) -> Pending: ...

    def post(self, name: str, buffer: Tensor) -> Pending:
        """Post a receive; waiting for it fills `buffer`. ChannelError if another message arrives."""
        ...


class Swap(Protocol):
    """All-to-all of one expert group: rows sent to each member, and the places of rows received from each."""

    def start(self, name: str, outgoing: Rows, incoming: Rows) -> list[Work]: ...


Shares = tuple[tuple[slice, ...], ...]  # disjoint parts of a flat tensor, by holder


def equal_shares(elements: int, members: int) -> Shares:
    """Split the elements into equal ranges, one per member; the last may be shorter."""
    extent = -(-elements // members)
    return tuple((slice(min(r * extent, elements), min((r + 1) * extent, elements)),) for r in range(members))


def sum_in_order(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum at least two tensors of one shape, from the first to the last, so that the result is deterministic.

    `out`: the output; it may be one of the first two parts, but none of the others.
    """
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total


def largest_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the elementwise maximum of tensors of one shape; NaN if one of them is NaN."""
    return torch.stack([*parts]).amax(0)


class Sums(Protocol):
    """Reductions over all ranks, and over the holders of a bucket. On CPUs sums are in the order of ranks, so results
    are bit-identical for every carrier."""

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> None:
        """Sum a small tensor over the world, or with `largest` take the maximum of each element."""
        ...

    def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
        """Start to sum a flat tensor over its holders. Do not touch it until the work is done. With `shares` each
        holder then has valid sums in the parts that it owns alone.

        Never waits for another rank. Holders of several tensors start the sums in the same order, and wait in the same
        order.
        """
        ...

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        """All-gather a flat tensor from the parts that its holders own (`shares`)."""
        ...


class Parts(Protocol):
    """Collectives on flat tensors with equal parts, one per member of a channel. They overlap with compute."""

    def scatter(self, name: str, flat: Tensor, room: Tensor) -> Work:
        """Start to reduce-scatter `flat`. This member's part of `room`, which is as large as `flat`, gets the sums; the
        rest of `room` is undefined. `room` may be `flat`; otherwise `flat` does not change."""
        ...

    def gather(self, name: str, flat: Tensor) -> Work:
        """Start to all-gather `flat` in place: it has the part of this member."""
        ...


@dataclass(frozen=True)
class WantedChannels:
    """The channels of a world in the order of opening, and the flat tensors that are summed and gathered over holders.
    `parted`: channels for flat tensors in equal parts, with the bytes of the largest part."""

    mesh: Mesh
    openings: tuple[Opening, ...]
    flats: Mapping[str, tuple[tuple[int, ...], int]]  # name → holders, bytes
    parted: Mapping[Channel, int] = field(default_factory=dict)

    def channels(self, rank: int) -> list[Channel]:
        """Return the channels of a rank, in the order in which it opens them."""
        pairs = [(opening.kind, opening.channel_of(self.mesh, rank)) for opening in self.openings]
        return [Channel(kind, ranks) for kind, ranks in pairs if ranks is not None]

    def member_ranks(self, rank: int, kind: str) -> list[tuple[int, ...]]:
        """Return the member ranks of the channels of a kind that a rank is in."""
        return [ranks for channel_kind, ranks in self.channels(rank) if channel_kind == kind]


class Links(Protocol):
    """The open channels of a rank."""

    sums: Sums
    carriers: Mapping[Channel, Carrier]  # by channel of the rank

    def edge(self, source: int, destination: int) -> Edge: ...

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        """Return the swap of one expert group, for rows or for counts; None for a group of one."""
        ...

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        """Return the channel of holders that shard a bucket, or of a tensor or context group."""
        ...

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return zeroed memory for a flat tensor, if the transport needs it in a certain place; else None."""
        ...


class SingleRankLinks:
    """The channels of a world with one rank: there are none."""

    class _SingleRankSums:
        def all_reduce(self, tensor: Tensor, largest: bool = False) -> None: ...

        def start_reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares = ()) -> Work:
            raise ChannelError("a world of one rank has no sums")

        def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None: ...

    sums: Sums = _SingleRankSums()
    carriers: Mapping[Channel, Carrier] = {}

    def edge(self, source: int, destination: int) -> Edge:
        raise ChannelError("a world of one rank has no messages")

    def swap(self, kind: SwapKind, members: tuple[int, ...]) -> Swap | None:
        return None

    def parts(self, kind: PartsKind, members: tuple[int, ...]) -> Parts:
        raise ChannelError("a world of one rank divides nothing")

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None


# --- Reduce-scatter and all-gather of flat tensors with equal parts, one per holder
#
# Both overlap with compute. Parts are summed in the order of the holders, as for a whole bucket, so that all transports
# except NCCL give bit-identical results.

BLOCK = 1 << 15  # elements summed at a time, of more than two tensors, so that the sum stays in the cache


@dataclass(frozen=True)
class PendingReduceScatter:
    """A pending reduce-scatter: the holders' parts for this rank arrive in `parts`, and `out` gets their sum."""

    works: Sequence[Work]
    parts: Sequence[Tensor]  # in the order of the holders
    out: Tensor

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        sum_parts(self.parts, self.out)


@dataclass(frozen=True)
class AllWork:
    """Several operations in flight, as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def sum_parts(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sum flat tensors of one size, in order. `out` may be one of them."""
    size = BLOCK if len(parts) > 2 else max(1, out.numel())
    is_read_late = any(out.data_ptr() == part.data_ptr() for part in parts[2:])  # after the first two are summed
    for start in range(0, out.numel(), size):
        block = slice(start, start + size)
        place = out[block]
        total = sum_in_order([part[block] for part in parts], None if is_read_late else place)
        if is_read_late:
            place.copy_(total)
