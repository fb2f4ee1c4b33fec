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
    """All-to-all of one expert group: `given` and `taken` are rows to and from each member; None: equal parts."""

    def start(
        self, name: str, tensor: Tensor, given: Sequence[int] | None, out: Tensor, taken: Sequence[int] | None
    ) -> list[Work]: ...


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
    received: tuple[int, ...]  # rows from each member


@dataclass
class Exchange:
    """The all-to-alls of one expert group. With one member nothing moves."""

    swap: Swap | None
    size: int
    sequence: int = 0
    pending: dict[str, tuple[Pending, ...]] = field(default_factory=dict)

    def start_counts(self, name: str, counts_E: Tensor) -> None:
        """Tell every member how many rows each of its experts will get from here."""
        stamp = counts_E.new_tensor([[self.sequence, digest(name)]]).expand(self.size, 2)
        self.pending[name] = (self._start(name, torch.cat([counts_E.view(self.size, -1), stamp], 1), None, None),)

    def wait_counts(self, name: str) -> tuple[Route, Tensor]:
        """The route, and offsets_G: int32 ends of the (source, local expert) groups of the receive buffer."""
        (pending,) = self.pending.pop(name)
        theirs, (mine,) = pending.wait(), pending.keep
        if not (theirs[:, -2:] == mine[:, -2:]).all():
            raise ChannelError(f"{name}: members of the expert group are in different exchanges: {theirs.tolist()}")
        received = theirs[:, :-2]
        route = Route(sent=tuple(mine[:, :-2].sum(1).tolist()), received=tuple(received.sum(1).tolist()))
        return route, received.reshape(-1).cumsum(0).to(torch.int32)

    def start(self, name: str, tensors: Sequence[Tensor], route: Route, forward: bool) -> None:
        """`forward`: from the tokens' rank to the experts' rank (dispatch, and the gradient of combine)."""
        given, taken = (route.sent, route.received) if forward else (route.received, route.sent)
        self.pending[name] = tuple(self._start(name, t, given, taken) for t in tensors)

    def wait(self, name: str) -> tuple[Tensor, ...]:
        return tuple(p.wait() for p in self.pending.pop(name))

    def _start(self, name: str, tensor: Tensor, given: Sequence[int] | None, taken: Sequence[int] | None) -> Pending:
        self.sequence += 1
        if self.swap is None:
            return Pending([], tensor, keep=(tensor,))
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor) if taken is None else tensor.new_empty(sum(taken), *tensor.shape[1:])
        return Pending(self.swap.start(name, tensor, given, out, taken), out, keep=(tensor,))


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
