"""Which device each rank of a replay computes on: its own, or that of another rank (docs/resuming.md).

Devices have the numbers of the ranks that compute on them in a run. On one machine, numbers above those are devices
that no rank of the run uses. On CPUs a device is a core of those that this process may use; the ranks stay on it.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Slots:
    """`exchanged`: two ranks that compute on each other's device. `shift`: each rank computes on the device of the one
    so many further on. `fixed`: on CPUs, whether each rank stays on its core."""

    exchanged: tuple[int, int] = (0, 0)
    shift: int = 0
    fixed: bool = True

    @staticmethod
    def parse(text: str) -> Slots:
        """The inverse of `str`. ValueError for other texts."""
        if text == "any":
            return Slots(fixed=False)
        if found := re.fullmatch(r"\+([0-9]{1,7})", text, re.ASCII):
            return Slots(shift=int(found[1]))
        if found := re.fullmatch(r"([0-9]{1,7}),([0-9]{1,7})", text, re.ASCII):
            return Slots((int(found[1]), int(found[2])))
        raise ValueError(f"{text!r} is neither A,B nor +N nor any")

    def __str__(self) -> str:
        if not self.fixed:
            return "any"
        first, second = self.exchanged
        return f"{first},{second}" if first != second else f"+{self.shift}"

    def device_of(self, rank: int, world: int) -> int:
        """The number of the device that a rank computes on."""
        first, second = self.exchanged
        if first != second and rank in self.exchanged:
            return second if rank == first else first
        return (rank + self.shift) % world

    def rank_on(self, device: int, world: int) -> int:
        """The rank that computes on the device of a rank of the run."""
        return next(rank for rank in range(world) if self.device_of(rank, world) == device)

    def refusal(self, world: int, kind: str, devices: int) -> str:
        """Why the ranks of one machine cannot compute like this; "" if they can.

        `kind`: cpu, cuda or shared; `devices`: how many this machine has.
        """
        moved = {rank: at for rank in range(world) if (at := self.device_of(rank, world)) != rank}
        what = "core" if kind == "cpu" else "device"
        if min(self.exchanged) >= world:
            return f"there is no rank {min(self.exchanged)}: the run has ranks 0 to {world - 1}"
        if not moved:
            return ""
        if kind == "shared":
            return "all ranks compute on one device here: there is none to exchange it with"
        if (last := max(moved.values())) >= max(world, devices):
            return f"there is no rank and no {what} {last}: this machine has {devices} of these, the run {world} ranks"
        for rank, at in moved.items():
            if kind == "cpu" and at % devices == rank % devices:
                other = f"ranks {rank} and {at}" if at < world else f"rank {rank} and device {at}"
                return f"{other} have the same core here, for this process may use {devices}"
        return ""


def count(kind: str) -> int:
    """How many devices of a kind this machine has: cores that this process may use, or CUDA devices."""
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    import torch

    return torch.cuda.device_count()


def take_core(number: int) -> str:
    """Stay on a core, by its number among those that this process may use; the name of the core."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[number % len(cores)]
    os.sched_setaffinity(0, {core})
    return f"core {core}"


def name_of(device: torch.device) -> str:
    """The name of a CUDA device: its number, its model and its UUID."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{device} {found.name} {getattr(found, 'uuid', '')}".strip()


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()
