"""Channels of a rank over torch.distributed: pipeline messages, expert exchanges, reductions.

One communicator per ordered pair of pipeline ranks that talk, so that in-order delivery per direction is all that is
asked of the backend; one per expert group; one per set of holders. Every message of a checked run carries its name and
place in the channel, and every exchange of counts carries its place in the group's order: members that disagree stop
with an error instead of swapping data silently, as gloo would.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


class ChannelError(RuntimeError):
    """The two ends of a channel disagree about what is being exchanged."""


@dataclass
class Pending:
    """An operation in flight: what to wait for, what it gives, and what it must keep alive."""

    works: list[dist.Work]
    result: Tensor
    keep: tuple[Tensor, ...] = ()
    header: Tensor | None = None

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


def digest(name: str) -> int:
    return zlib.crc32(name.encode())


@dataclass
class Edge:
    """One direction between two pipeline ranks; in-order, so messages need no tags."""

    group: dist.ProcessGroup
    peer: int  # world rank at the other end
    checked: bool
    sequence: int = 0

    def send(self, name: str, tensor: Tensor) -> Pending:
        tensor = tensor.contiguous()
        works: list[dist.Work] = []
        header = None
        if self.checked:
            header = torch.tensor([self.sequence, digest(name)], device=tensor.device)
            works.append(_work(dist.isend(header, self.peer, self.group)))
        self.sequence += 1
        works.append(_work(dist.isend(tensor, self.peer, self.group)))
        return Pending(works, tensor, header=header)

    def post(self, name: str, buffer: Tensor) -> Pending:
        works: list[dist.Work] = []
        header = None
        if self.checked:
            header = torch.empty(2, dtype=torch.int64, device=buffer.device)
            works.append(_work(dist.irecv(header, self.peer, self.group)))
        works.append(_work(dist.irecv(buffer, self.peer, self.group)))
        pending = Pending(works, buffer, header=header)
        if header is not None:
            pending.keep = (torch.tensor([self.sequence, digest(name)], device=buffer.device),)
        self.sequence += 1
        return pending

    def take(self, name: str, pending: Pending) -> Tensor:
        result = pending.wait()
        if pending.header is not None and not torch.equal(pending.header, pending.keep[0]):
            raise ChannelError(f"recv {name}: rank {self.peer} sent another message ({pending.header.tolist()})")
        return result


@dataclass(frozen=True)
class Route:
    """Who sends how many rows to whom in one layer and micro-batch; every exchange of the layer follows it."""

    sent: tuple[int, ...]  # rows to each member
    received: tuple[int, ...]  # rows from each member


@dataclass
class Exchange:
    """The all-to-all of one expert group. With one member nothing moves."""

    group: dist.ProcessGroup | None
    size: int
    sequence: int = 0
    pending: dict[str, tuple[Pending, ...]] = field(default_factory=dict)

    def start_counts(self, name: str, counts_E: Tensor) -> None:
        """Tell every member how many rows each of its experts will get from here."""
        stamp = counts_E.new_tensor([[self.sequence, digest(name)]]).expand(self.size, 2)
        self.pending[name] = (self._start(torch.cat([counts_E.view(self.size, -1), stamp], 1), None, None),)

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
        self.pending[name] = tuple(self._start(t, given, taken) for t in tensors)

    def wait(self, name: str) -> tuple[Tensor, ...]:
        return tuple(p.wait() for p in self.pending.pop(name))

    def _start(self, tensor: Tensor, given: Sequence[int] | None, taken: Sequence[int] | None) -> Pending:
        self.sequence += 1
        tensor = tensor.contiguous()
        if self.group is None:
            return Pending([], tensor, keep=(tensor,))
        out = torch.empty_like(tensor) if taken is None else tensor.new_empty(sum(taken), *tensor.shape[1:])
        sizes = (None if taken is None else list(taken), None if given is None else list(given))
        work = dist.all_to_all_single(out, tensor, sizes[0], sizes[1], group=self.group, async_op=True)
        return Pending([_work(work)], out, keep=(tensor,))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work


Channel = tuple[str, tuple[int, ...]]  # ("edge", (source, destination)), ("expert", members), ("reduce", holders)
Groups = Mapping[Channel, dist.ProcessGroup]


def channels(
    mesh: Mapping[str, int], edges: Iterable[tuple[int, int]], holders: Iterable[tuple[int, ...]]
) -> list[Channel]:
    """Every channel of a world that needs a communicator, in one order.

    edges: (source, destination) pipeline ranks, each a channel in every column; (a, b) and (b, a) are two.
    """
    pp, dp, ep = mesh["pp"], mesh["dp"], mesh["ep"]
    pairs = [("edge", (a * dp + d, b * dp + d)) for a, b in edges for d in range(dp)]
    experts = [("expert", tuple(range(first, first + ep))) for first in range(0, pp * dp, ep)]
    reduces = [("reduce", ranks) for ranks in sorted(set(holders))]
    return [(kind, ranks) for kind, ranks in (*pairs, *experts, *reduces) if len(ranks) > 1]


def connect(rank: int, wanted: Iterable[Channel], timeout_s: float) -> Groups:
    """The communicators of `rank`. Every rank makes all of them, for torch names groups by how many it has made."""
    made = {}
    for kind, ranks in wanted:
        group = dist.new_group(sorted(ranks), timeout=timedelta(seconds=timeout_s), group_desc=f"{kind} {ranks}")
        if rank in ranks:
            made[kind, ranks] = group
    return made
