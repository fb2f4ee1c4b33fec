"""Pretend nodes, whose facts tests choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.observe.doctor.checks import Clock, Device, Disk, Drivers, Limits, Links, Memory, Network, Node

GIB = 2**30
H100 = Device("NVIDIA H100 80GB HBM3", 132, 80 * GIB)
CPUS = Node(
    cpus=8,
    devices=(),
    drivers=Drivers("2.13.0", "3.9.0", "", "", ""),
    memory=Memory(64 * GIB, 8 * GIB),
    disk=Disk("/runs", 10**12, True),
    limits=Limits(65536, -1),
    clock=Clock(1.8e9, True),
    network=Network("first", "10.0.0.1", 29400, ""),
    links=Links(5e9),
    native="",
)
GPUS = replace(
    CPUS,
    devices=(H100,) * 8,
    drivers=Drivers("2.13.0", "3.9.0", "13.0", "580.65", "2.28.3"),
    links=Links(5e9, 5e10, 4e11, 3e11),
)


def changed(node: Node, fact: str, **values: Any) -> Node:
    """A node of which some values of a fact are others."""
    return replace(node, **{fact: replace(getattr(node, fact), **values)})
