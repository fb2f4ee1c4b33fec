"""Pretend nodes with chosen facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.observe.doctor.checks import (
    Clock,
    CudaDevice,
    Disk,
    Drivers,
    HostMemory,
    HostNetwork,
    LinkSpeeds,
    NodeFacts,
    ProcessLimits,
)
from runtime.observe.health.devices import DeviceHealth

GIB = 2**30
H100 = CudaDevice("NVIDIA H100 80GB HBM3", 132, 80 * GIB)
CPUS = NodeFacts(
    cpus=8,
    devices=(),
    drivers=Drivers("2.13.0", "3.9.0", "", "", ""),
    memory=HostMemory(64 * GIB, 8 * GIB),
    disk=Disk("/runs", 10**12, True),
    limits=ProcessLimits(65536, -1),
    clock=Clock(1.8e9, True),
    network=HostNetwork("first", "10.0.0.1", 29400, ""),
    links=LinkSpeeds(5e9),
    native="",
    boundary="",
    health=(),
)
GPUS = replace(
    CPUS,
    devices=(H100,) * 8,
    drivers=Drivers("2.13.0", "3.9.0", "13.0", "580.65", "2.28.3"),
    links=LinkSpeeds(5e9, 5e10, 4e11, 3e11),
    health=tuple(DeviceHealth(index, H100.name, uncorrected=0, celsius=60, max_celsius=87) for index in range(8)),
)


def changed(node: NodeFacts, fact: str, **values: Any) -> NodeFacts:
    """The node with other values in one fact."""
    return replace(node, **{fact: replace(getattr(node, fact), **values)})
