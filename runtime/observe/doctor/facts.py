"""What is found out about a node. A value that could not be found out is a Problem, whose text says why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Why something could not be found out, in one line."""

    why: str


@dataclass(frozen=True)
class Device:
    """A CUDA device, as its driver describes it."""

    name: str
    sms: int
    memory_bytes: int


@dataclass(frozen=True)
class Drivers:
    """Versions; "" where there is none."""

    torch: str
    triton: str
    cuda: str  # that torch was built for
    driver: str
    nccl: str


@dataclass(frozen=True)
class Disk:
    """Where the run goes: the folder that is there already, and the bytes that are free in it."""

    folder: str
    free_bytes: int
    is_writable: bool


@dataclass(frozen=True)
class Limits:
    """Soft limits of a process: open files, and bytes of locked memory (-1: none)."""

    files: int
    locked_bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of the host, and of the file system by which processes share it (0: there is none)."""

    free_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Links:
    """Measured bytes a second: between two processes, host to device, and between devices (None: fewer than two).

    `nccl`: of an all-reduce over all devices, per device, None where it was not measured.
    """

    processes: float
    to_device: float | None = None
    devices: float | None = None
    nccl: float | None = None


@dataclass(frozen=True)
class Clock:
    """Seconds since 1970, and whether the kernel says that the clock is kept by another one."""

    now_s: float
    is_synchronised: bool


@dataclass(frozen=True)
class Network:
    """The name of this host and the address that it resolves to, and why the port is taken ("": it is free)."""

    host: str
    address: str
    port: int
    port_problem: str


@dataclass(frozen=True)
class Node:
    """All facts. `native`: why ops do not run in C++, "" where they do."""

    cpus: int
    devices: tuple[Device, ...] | Problem
    drivers: Drivers | Problem
    memory: Memory | Problem
    disk: Disk | Problem
    limits: Limits | Problem
    clock: Clock | Problem
    network: Network | Problem
    links: Links | Problem
    native: str | Problem
