"""What the driver knows about a GPU's health, and what is wrong with it: memory, clocks, links, temperature.

This module does not ask the driver (runtime/observe/health/nvml.py does). Counters are those of NVML
(https://docs.nvidia.com/deploy/nvml-api/); what errors of memory mean is in
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

IDLE = 0x1  # a bit of the reasons why clocks are lowered
# Clocks are lowered because something is wrong. Of the other bits, a cap of power is usual under load.
SLOWED = {
    0x8: "by hardware: power or temperature",
    0x20: "by the driver: temperature",
    0x40: "by hardware: temperature",
    0x80: "by the power supply",
}
# Xid errors of programs, not of devices (https://docs.nvidia.com/deploy/xid-errors/).
XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})


@dataclass(frozen=True)
class PcieLink:
    """Width in lanes and generation of a PCIe link, and the largest that device and slot have."""

    width: int
    max_width: int
    generation: int
    max_generation: int


@dataclass(frozen=True)
class DeviceHealth:
    """The health of a device; None for what the device or its driver does not tell.

    uncorrected: memory errors since the driver was loaded. is_repair_pending: a page or row is replaced at the next
    reset. is_repair_failed: there is no replacement left. clock_reasons: bits of NVML. link_errors: of all NVLinks
    since the driver was loaded. celsius, max_celsius: temperature, and the highest for operation. xids: Xid errors
    since the last look.
    """

    index: int
    name: str
    uncorrected: int | None = None
    is_repair_pending: bool | None = None
    is_repair_failed: bool | None = None
    clock_reasons: int | None = None
    link_errors: int | None = None
    pcie: PcieLink | None = None
    celsius: int | None = None
    max_celsius: int | None = None
    xids: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceFault:
    """Something that is wrong with a device. `kind`: a short name that does not change; `mend`: what to do."""

    severity: Severity
    kind: str
    found: str
    mend: str


def faults_of(health: DeviceHealth, first: DeviceHealth | None = None) -> Iterator[DeviceFault]:
    """Yield what is wrong with a device. `first`: an earlier look, from which errors of links count."""
    reset = "end what uses the device, then `nvidia-smi --gpu-reset`, or start the node again"
    if health.is_repair_failed:
        yield DeviceFault("error", "memory repair", "its memory cannot be repaired", "have the device replaced")
    if health.is_repair_pending:
        yield DeviceFault("warning", "memory repair", "a part of its memory is replaced at the next reset", reset)
    if health.uncorrected:
        found = f"{health.uncorrected} uncorrected memory errors since its driver was loaded"
        yield DeviceFault("warning", "memory errors", found, f"{reset}; if they return, have it replaced")
    for xid in health.xids:
        if xid not in XIDS_OF_PROGRAMS:
            mend = "look it up in https://docs.nvidia.com/deploy/xid-errors/, and at dmesg"
            yield DeviceFault("error", f"Xid {xid}", f"the driver reports error Xid {xid}", mend)
    for bit, why in SLOWED.items():
        if (health.clock_reasons or 0) & bit:
            mend = "look at cooling, power and nvidia-smi -q -d PERFORMANCE"
            yield DeviceFault("warning", "clocks", f"its clocks are lowered {why}", mend)
    if health.celsius is not None and health.max_celsius is not None and health.celsius > health.max_celsius:
        found = f"{health.celsius} °C, and {health.max_celsius} °C are allowed"
        yield DeviceFault("warning", "temperature", found, "look at fans, air and coolant")
    if errors := (health.link_errors or 0) - ((first and first.link_errors) or 0):
        found = f"{errors} errors of NVLink since {'the start of the run' if first else 'its driver was loaded'}"
        yield DeviceFault(
            "warning", "NVLink", found, "look at nvidia-smi nvlink -e, and reseat the device or its cable"
        )
    if health.pcie is not None:
        yield from _pcie_faults(health.pcie, is_idle=bool((health.clock_reasons or 0) & IDLE))


def _pcie_faults(link: PcieLink, *, is_idle: bool) -> Iterator[DeviceFault]:
    mend = "reseat the device or its riser, and look at the settings of the slot"
    if link.width < link.max_width:
        yield DeviceFault("warning", "PCIe width", f"{link.width} of {link.max_width} lanes of PCIe", mend)
    if link.generation < link.max_generation and not is_idle:  # an idle device lowers it to save power
        found = f"PCIe {link.generation} instead of {link.max_generation}"
        yield DeviceFault("warning", "PCIe generation", found, mend)
