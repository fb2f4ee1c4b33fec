"""Which transport a world has: memory where all ranks are of one machine and compute on its CPU, else collectives.

Ranks that share a GPU take what ranks of a CPU would, and copies (staged.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist

from runtime.comm.collective import CollectiveLinks
from runtime.comm.communicator import Communicator, name_of
from runtime.comm.host import HostLinks, part_of, parts_of
from runtime.comm.meeting import Meeting
from runtime.comm.memory import Address, Memory, can_share, make_memory, map_memory
from runtime.comm.staged import StagedLinks
from runtime.comm.transport import Alone, Channel, ChannelError, Links, Wanted
from runtime.options import START_TIMEOUT_S

Transport = Literal["auto", "memory", "gloo"]  # gloo: torch.distributed, NCCL on GPUs
CPU = torch.device("cpu")
PEER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Endpoint:
    """A rank's end of all channels: the device that its tensors are on, and how it talks to its peers.

    `timeout_s`: how long it waits for one; `start_timeout_s`: how long for all to come to the start. `checked`: every
    message is verified (tests). `sms`: those that communicate, of a device; 0: as many as NCCL takes.
    """

    device: torch.device = CPU
    transport: Transport = "auto"
    timeout_s: float = PEER_TIMEOUT_S
    checked: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    sms: int = 0

    def connect(self, rank: int, wanted: Wanted, set_action: Callable[[str], None] = lambda _: None) -> Links:
        """Open the channels of `rank`, in the one order of all ranks. `set_action`: is told which.

        Raises MissingRankError where a rank does not come; ChannelError where another one is at the end of a channel;
        OSError where `memory` was asked for and is not shared.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Alone()
        meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, self.start_timeout_s, set_action)
        meeting.arrive("connect", range(dist.get_world_size()))
        staged = self.device.type != "cpu" and dist.get_backend() == "gloo"  # ranks share a device: runtime/device.py
        if not staged and self.device.type != "cpu":
            return self._collective_links(rank, wanted, meeting, self.device)
        links = self._host_links(rank, wanted, meeting)
        return StagedLinks(links) if staged else links

    def _collective_links(self, rank: int, wanted: Wanted, meeting: Meeting, device: torch.device) -> Links:
        made: dict[Channel, Communicator] = {}
        for channel in wanted.channels(rank):
            made[channel] = Communicator(channel, rank, meeting, self.start_timeout_s, self.timeout_s, self.sms)
            made[channel].greet(device)
        return CollectiveLinks(made, self.checked)

    def _host_links(self, rank: int, wanted: Wanted, meeting: Meeting) -> Links:
        if self.transport != "gloo":
            found = _memories(rank, wanted)
            if not isinstance(found, str):
                return HostLinks(rank, wanted, found, self.timeout_s)
            if self.transport == "memory":
                raise OSError(f"ranks cannot share memory: {found}")
        return self._collective_links(rank, wanted, meeting, CPU)


def transport_in_use(links: Links) -> str:
    """What carries the messages of a rank: "memory", "gloo" or "nccl"; "none" where there is one rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return "none"
    inner = links.host if isinstance(links, StagedLinks) else links
    return "memory" if isinstance(inner, HostLinks) else dist.get_backend()


def expected_transport(asked: Transport, backend: str, world: int) -> str:
    """What `transport_in_use` will be, as far as that is known before ranks have tried to share memory."""
    if world == 1:
        return "none"
    return backend if backend != "gloo" or asked == "gloo" or not can_share() else "memory"


def _memories(rank: int, wanted: Wanted) -> list[Memory] | str:
    """The memories of all ranks, or why one of them cannot be reached: the same on all ranks."""
    mine, said, descriptor = None, "", None
    try:
        if not can_share():
            raise OSError("this processor or system does not promise an order of stores")
        mine, address = make_memory(parts_of(rank, wanted))
        said, descriptor = json.dumps(asdict(address)), address.descriptor
    except OSError as error:
        problem = str(error)
    addresses = _tell_all(said)
    mapped: list[Memory] = []
    try:
        if all(addresses):
            _check_ends(rank, wanted, [Address(**json.loads(text)) for text in addresses])
        for other, text in enumerate(addresses):
            if not text:
                raise OSError(problem if other == rank else f"rank {other} has none")
            mapped.append(mine if mine and other == rank else map_memory(Address(**json.loads(text))))
        problem = ""
    except OSError as error:
        problem = f"rank {rank}: {error}"
    problems = _tell_all(problem)
    if descriptor is not None:
        os.close(descriptor)  # all have mapped it, or none will
    return next((each for each in problems if each), "") or mapped


def _check_ends(rank: int, wanted: Wanted, addresses: Sequence[Address]) -> None:
    """Raise ChannelError unless each rank has in its memory what this one reads and writes there, by its name."""
    for kind, ranks in wanted.channels(rank):
        for other in ranks:
            theirs = part_of((kind, ranks), other, rank)
            if other != rank and theirs is not None and theirs not in addresses[other].parts:
                raise ChannelError(f"connect {name_of((kind, ranks))}: rank {other} has no {theirs!r}")


def _tell_all(text: str) -> list[str]:
    """The texts of all ranks, on every rank."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    longest = torch.tensor(data.numel())
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = torch.full((int(longest),), ord(" "), dtype=torch.uint8)
    mine[: data.numel()] = data
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return [bytes(each.tolist()).decode().strip() for each in all_of_them]
