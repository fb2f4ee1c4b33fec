"""Assigns ranks of a replay to devices: their own, or those of other ranks (docs/resuming.md).

A device has the number of the rank that uses it in the run. On one machine, higher numbers are devices that no rank of
the run uses. On CPUs a device is one of the cores that this process may use, to which the rank is pinned.
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
    """`exchanged`: two ranks that use each other's device. `shift`: each rank uses the device of rank + shift. `fixed`:
    on CPUs, whether each rank is pinned to its core."""

    exchanged: tuple[int, int] = (0, 0)
    shift: int = 0
    is_fixed: bool = True

    @staticmethod
    def parse(text: str) -> Slots:
        """Parse the result of `str`. ValueError for other texts."""
        if text == "any":
            return Slots(is_fixed=False)
        if match := re.fullmatch(r"\+([0-9]{1,7})", text, re.ASCII):
            return Slots(shift=int(match[1]))
        if match := re.fullmatch(r"([0-9]{1,7}),([0-9]{1,7})", text, re.ASCII):
            return Slots((int(match[1]), int(match[2])))
        raise ValueError(f"{text!r} is not A,B, +N or any")

    def __str__(self) -> str:
        if not self.is_fixed:
            return "any"
        first, second = self.exchanged
        return f"{first},{second}" if first != second else f"+{self.shift}"

    def device_of(self, rank: int, world: int) -> int:
        """Return the number of the device of a rank."""
        first, second = self.exchanged
        if first != second and rank in self.exchanged:
            return second if rank == first else first
        return (rank + self.shift) % world

    def rank_on(self, device: int, world: int) -> int:
        """Return the rank that uses a device."""
        return next(rank for rank in range(world) if self.device_of(rank, world) == device)

    def refusal(self, world: int, kind: str, devices: int) -> str:
        """Return why the ranks of one machine cannot use these slots, or "".

        `kind`: cpu, cuda or shared; `devices`: number of devices of this machine.
        """
        moved = {rank: device for rank in range(world) if (device := self.device_of(rank, world)) != rank}
        noun = "core" if kind == "cpu" else "device"
        if min(self.exchanged) >= world:
            return f"there is no rank {min(self.exchanged)}: the run has ranks 0 to {world - 1}"
        if not moved:
            return ""
        if kind == "shared":
            return "all ranks compute on one device here: there is none to exchange it with"
        if (last := max(moved.values())) >= max(world, devices):
            return (
                f"no rank and no {noun} is numbered {last}: this machine has {devices} {noun}s, the run {world} ranks"
            )
        for rank, device in moved.items():
            if kind == "cpu" and device % devices == rank % devices:
                pair = f"ranks {rank} and {device}" if device < world else f"rank {rank} and device {device}"
                return f"{pair} have the same core here: this process may use only {devices}"
        return ""


def count(kind: str) -> int:
    """Count the devices of a kind: cores that this process may use, or CUDA devices."""
    if kind == "cpu":
        return len(os.sched_getaffinity(0))
    import torch

    return torch.cuda.device_count()


def take_core(number: int) -> str:
    """Pin this process to a core, by number among those that it may use. Return the name of the core."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[number % len(cores)]
    os.sched_setaffinity(0, {core})
    return f"core {core}"


def name_of(device: torch.device) -> str:
    """Return the name of a CUDA device: its number, its model and its UUID."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return f"{device} {properties.name} {getattr(properties, 'uuid', '')}".strip()


def host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
