"""A group of ranks over torch.distributed, which its members alone make: of gloo between processes, NCCL between GPUs.

`torch.distributed.new_group` names a group by how many groups the process has made, so all ranks must make all groups.
A communicator has a name of its own in the store instead (docs/adr/0020-channels-are-opened-in-one-proven-order.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.comm.meeting import Meeting
from runtime.comm.transport import Carrier, Channel, ChannelError, SwapKind, Work, digest


class Communicator:
    """One channel. Peers are world ranks; tensors are contiguous."""

    def __init__(
        self, channel: Channel, rank: int, meeting: Meeting, start_timeout_s: float, timeout_s: float, sms: int = 0
    ) -> None:
        """Waits for the members, `start_timeout_s` at most; MissingRankError. Later calls wait for `timeout_s`.

        `sms`: those of a GPU that all its communicators together may take; 0: as many as NCCL takes.
        """
        self.kind, self.members = channel
        self.rank, self.name, self.sms = rank, name_of(channel), sms
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
            options.group_name = self.name  # type: ignore[assignment]  # a str of its own type
            if self.sms:
                options.config.max_ctas = most_ctas(self.kind, self.sms)
            return dist.ProcessGroupNCCL(*place, options)
        group = dist.ProcessGroupGloo(*place, timedelta(seconds=start_timeout_s))  # it connects at once
        group._set_default_timeout(timedelta(seconds=timeout_s))
        return group

    def index_of(self, rank: int) -> int:
        """The place of a world rank among the members."""
        return self.members.index(rank)

    def greet(self, device: torch.device) -> None:
        """Use the channel for the first time, as it will be used later. ChannelError: another rank is at its end."""
        stamp = digest(self.name)
        mine = torch.tensor([self.rank, stamp], device=device)
        size = len(self.members)
        theirs = torch.zeros(size, 2, dtype=mine.dtype, device=device)
        if self.kind == "edge":
            self._greet_peer(mine, theirs)
        elif self.kind in get_args(SwapKind):
            ones = (1,) * size
            self.all_to_all(theirs, mine.expand(size, 2).contiguous(), ones, ones).wait()
        else:
            self.all_gather(list(theirs), mine)
            self.all_reduce(torch.ones(1, device=device)).wait()
        if theirs.tolist() != [[member, stamp] for member in self.members]:
            raise ChannelError(f"connect {self.name}: other ranks than these answer: {theirs.tolist()}")

    def _greet_peer(self, mine: Tensor, theirs: Tensor) -> None:
        """A message along the edge, and one back."""
        here = self.index_of(self.rank)
        theirs[here], peer = mine, self.members[1 - here]
        answer = torch.zeros_like(mine)
        for sends in (here == 0, here == 1):
            (self.send(mine, peer) if sends else self.receive(answer, peer)).wait()
        theirs[1 - here] = answer

    # ---- what channels use

    def send(self, tensor: Tensor, peer: int) -> Work:
        """Begin to send a tensor."""
        return _work(self._group.send([tensor], self.index_of(peer), 0))

    def receive(self, tensor: Tensor, peer: int) -> Work:
        """Begin to receive into a tensor."""
        return _work(self._group.recv([tensor], self.index_of(peer), 0))

    def all_to_all(self, room: Tensor, sent: Tensor, taken: Sequence[int], given: Sequence[int]) -> Work:
        """Begin to give each member `given` rows of `sent`, and to take `taken` rows of each."""
        return _work(self._group.alltoall_base(room, sent, list(taken), list(given)))

    def all_reduce(self, tensor: Tensor, largest: bool = False) -> Work:
        """Begin to sum a tensor over the members, or to take the largest of each of its numbers."""
        return _work(self._group.allreduce([tensor], dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM))

    def reduce_scatter(self, mine: Tensor, whole: Tensor) -> Work:
        """Begin to give each member the sum of the part of `whole` at its place. Parts are equal; `mine` may be one.
        NCCL has it, gloo has not."""
        return _work(self._group._reduce_scatter_base(mine, whole))

    def all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        """Give each row the tensor of the member at its place."""
        self.start_all_gather(rows, mine).wait()

    def start_all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> Work:
        """Begin to do so. `mine` may be one of the rows."""
        return _work(self._group.allgather([list(rows)], [mine]))

    def start_flat_gather(self, whole: Tensor, mine: Tensor) -> Work:
        """Begin to fill `whole` with the equal parts of the members; `mine` may be the one at this one's place."""
        return _work(self._group._allgather_base(whole, mine))


def most_ctas(kind: str, sms: int) -> int:
    """The thread blocks of NCCL, each of which takes an SM, for a channel of a kind, so that all that may run at a time
    take no more than `sms`, if that is 7 or more: a rank has at most four directions of messages, its counts, its rows,
    and sums of gradients, which take a quarter of what is left."""
    sums = max(1, (sms - 5) // 4)
    return {"edge": 1, "counts": 1, "reduce": sums}.get(kind, max(1, sms - 5 - sums))


def name_of(channel: Channel) -> str:
    """edge 3>4, expert 0-63, reduce 0-127, 1920-2047: the kind of a channel, and its ranks."""
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
