"""What a rank's channels are: pipeline messages, expert exchanges, sums. `connect` says over what they go.

One channel per ordered pair of pipeline ranks that talk, so that in-order delivery per direction is all that is asked
of it; one per expert group; one per set of holders. Every exchange of counts carries its place in the group's order,
and messages carry their names where that costs nothing, or in a checked run: ends that disagree stop with an error
instead of swapping data silently.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from runtime.comm.rows import Layout, Rows, empty_rows
from runtime.contract import Mesh

Channel = tuple[str, tuple[int, ...]]  # ("edge", (source, destination)), ("expert", members), ("reduce", holders)


class ChannelError(RuntimeError):
    """The two ends of a channel disagree about what is being exchanged."""


class Work(Protocol):
    """Something in flight."""

    def wait(self) -> object: ...


@dataclass
class Pending:
    """An operation in flight: what to wait for, what it gives, and what it must keep alive."""

    works: list[Work]
    result: Tensor
    keep: tuple[Tensor, ...] = ()

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
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


class Sums(Protocol):
    """Collectives: over all ranks, and over the holders of a bucket."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a small tensor over the world."""
        ...

    def reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor) -> None:
        """Sum a flat tensor over its holders."""
        ...

    def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None:
        """Fill a flat tensor from the parts that its holders own, `shares` of each of them."""
        ...


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom in one layer and micro-batch; every exchange of the layer follows it."""

    sent: tuple[int, ...]  # rows to each member
    received: Layout  # rows from each member, and where they lie here


@dataclass
class Exchange:
    """The all-to-alls of one expert group. With one member and rows that are not padded nothing moves.

    `alignment`: the rows that an expert receives are padded to a multiple of it.
    """

    swap: Swap | None
    size: int
    alignment: int = 1
    sequence: int = 0
    pending: dict[str, tuple[Pending, ...]] = field(default_factory=dict)

    def start_counts(self, name: str, counts_E: Tensor) -> None:
        """Tell every member how many rows each of its experts will get from here."""
        stamp = counts_E.new_tensor([[self.sequence, digest(name)]]).expand(self.size, 2)
        counts, ones = torch.cat([counts_E.view(self.size, -1), stamp], 1), (1,) * self.size
        if self.swap is None:
            self.pending[name] = (self._stays(counts),)
        else:
            self.pending[name] = (self._start(name, Rows(counts, ones), Rows(torch.empty_like(counts), ones)),)

    def wait_counts(self, name: str) -> tuple[Route, Tensor]:
        """The route, and offsets_E: where the rows of each local expert end among those received (int32), its padding
        among them."""
        (pending,) = self.pending.pop(name)
        theirs, (mine,) = pending.wait(), pending.keep
        if not (theirs[:, -2:] == mine[:, -2:]).all():
            raise ChannelError(f"{name}: members of the expert group are in different exchanges: {theirs.tolist()}")
        layout = Layout(tuple(map(tuple, theirs[:, :-2].tolist())), self.alignment)
        route = Route(sent=tuple(mine[:, :-2].sum(1).tolist()), received=layout)
        return route, theirs.new_tensor(layout.ends, dtype=torch.int32)

    def start(self, name: str, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        """Start moving the rows of each tensor.

        `forward`: from the tokens' rank to the experts' rank (dispatch, and the gradient of combine).
        """
        self.pending[name] = tuple(self._start_rows(name, tensor, route, forward) for tensor in tensors)

    def wait(self, name: str) -> tuple[Tensor, ...]:
        return tuple(p.wait() for p in self.pending.pop(name))

    def _start_rows(self, name: str, tensor: Tensor, route: Route, forward: bool) -> Pending:
        layout = route.received
        if self.swap is None and self.alignment == 1:
            return self._stays(tensor)
        if forward:
            given, taken = Rows(tensor, route.sent), Rows(layout.empty(tensor), layout.of_sources, layout)
        else:
            given = Rows(tensor, layout.of_sources, layout)
            taken = Rows(empty_rows(tensor, sum(route.sent)), route.sent)
        return self._start(name, given, taken)

    def _stays(self, tensor: Tensor) -> Pending:
        """What comes is what was sent."""
        self.sequence += 1
        return Pending([], tensor, keep=(tensor,))

    def _start(self, name: str, given: Rows, taken: Rows) -> Pending:
        self.sequence += 1
        works: list[Work] = []
        if self.swap is None:
            taken.fill(given)
        else:
            works = self.swap.start(name, given, taken)
        return Pending(works, taken.tensor, keep=(given.tensor,))


@dataclass(frozen=True)
class Wanted:
    """The channels of a world, and the flat tensors that are summed and gathered over holders."""

    channels: tuple[Channel, ...]
    flats: Mapping[str, tuple[tuple[int, ...], int]]  # name → holders, bytes

    def of(self, rank: int, kind: str) -> list[tuple[int, ...]]:
        """The channels of a kind that a rank is in."""
        return [ranks for each, ranks in self.channels if each == kind and rank in ranks]


def channels(mesh: Mesh, edges: Iterable[tuple[int, int]], holders: Iterable[tuple[int, ...]]) -> tuple[Channel, ...]:
    """Every channel of a world, in one order.

    edges: (source, destination) pipeline ranks, each a channel in every column; (a, b) and (b, a) are two.
    """
    pp, dp, ep = mesh.pp, mesh.dp, mesh.ep
    pairs = [("edge", (a * dp + d, b * dp + d)) for a, b in edges for d in range(dp)]
    experts = [("expert", tuple(range(first, first + ep))) for first in range(0, pp * dp, ep)]
    reduces = [("reduce", ranks) for ranks in sorted(set(holders))]
    return tuple((kind, ranks) for kind, ranks in (*pairs, *experts, *reduces) if len(ranks) > 1)


class Links(Protocol):
    """A rank's channels, connected."""

    sums: Sums

    def edge(self, source: int, destination: int) -> Edge: ...

    def swap(self, members: tuple[int, ...]) -> Swap | None:
        """The swap of one expert group; None for a group of one."""
        ...

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Memory for a flat tensor, if it must lie in a certain place; zeros."""
        ...


class Alone:
    """The transport of a world of one rank, which has nobody to talk to."""

    class _Sums:
        def all_reduce(self, tensor: Tensor) -> None: ...

        def reduce(self, bucket: str, holders: tuple[int, ...], flat: Tensor) -> None: ...

        def gather(self, bucket: str, holders: tuple[int, ...], flat: Tensor, shares: Shares) -> None: ...

    sums: Sums = _Sums()

    def edge(self, source: int, destination: int) -> Edge:
        raise ChannelError("a world of one rank has no messages")

    def swap(self, members: tuple[int, ...]) -> Swap | None:
        return None

    def flat(self, name: str, elements: int, dtype: torch.dtype) -> Tensor | None:
        return None
