"""Accelerators with known peaks, from the vendors' data sheets, for a `device` of the same name.

Peaks are for SXM modules and dense products; data sheets since Hopper print the rate with sparsity, twice as high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

FIELDS = ("sms", "hbm", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Peaks:
    """Peaks of a device: streaming multiprocessors, byte/s, FLOP/s. `source`: their data sheet."""

    source: str
    sms: int
    hbm: float
    bf16: float
    fp8: float | None = None  # None: the device has no such products
    fp4: float | None = None


# SMs: architecture white papers of NVIDIA A100 (2020) and H100 (2022). An H800 is an H100 with slower NVLink, arXiv
# 2505.09343, section 2. A B200 has 18,944 CUDA cores, 128 of them in an SM; for AMD, compute units are SMs.
PEAKS: Mapping[str, Peaks] = {
    "a100": Peaks("NVIDIA A100 80GB SXM data sheet", 108, 2.039e12, 312e12),
    "h100": Peaks("NVIDIA H100 SXM data sheet", 132, 3.35e12, 989e12, 1979e12),
    "h200": Peaks("NVIDIA H200 SXM data sheet", 132, 4.8e12, 989e12, 1979e12),
    "h800": Peaks("NVIDIA H100 SXM data sheet, which H800 differs from in NVLink", 132, 3.35e12, 989e12, 1979e12),
    "b200": Peaks("NVIDIA HGX B200 data sheet", 148, 7.7e12, 2250e12, 4500e12, 9000e12),
    "b300": Peaks("NVIDIA HGX B300 data sheet", 148, 8e12, 2250e12, 4500e12, 13500e12),
    "gb200": Peaks("NVIDIA GB200 NVL72 data sheet, a GPU of it", 148, 8e12, 2500e12, 5000e12, 10000e12),
    "gb300": Peaks("NVIDIA GB300 NVL72 data sheet, a GPU of it", 148, 8e12, 2500e12, 5000e12, 15000e12),
    "mi300x": Peaks("AMD Instinct MI300X data sheet", 304, 5.3e12, 1307e12, 2615e12),
}


def peaks_of(name: str) -> Peaks | None:
    """The peaks of a device by its name, whatever its case; None if unknown."""
    return PEAKS.get(name.lower())


# --- Nodes of an expert group, and nodes that the experts of a token reach
#
# World ranks are assigned to devices in order, so an expert group is a contiguous run of devices.


def group_nodes(devices: int, expert: int) -> int | None:
    """Nodes of `devices` devices that an expert group of `expert` ranks spans: one, or several that it fills. None if
    some group covers only parts of several nodes."""
    if devices % expert == 0:
        return 1
    return expert // devices if expert % devices == 0 else None


def most_group_nodes(sizes: Iterable[int], expert: int) -> int | None:
    """The largest `group_nodes` over nodes of several sizes; None if it is None for any of them."""
    nodes = [group_nodes(devices, expert) for devices in sizes]
    return None if None in nodes else max(count for count in nodes if count is not None)


def groups_fit_nodes(groups: int, nodes: int) -> bool:
    """Whether each node holds whole groups of experts, or each group fills whole nodes."""
    return groups % nodes == 0 or nodes % groups == 0


@cache
def most_nodes_of_token(groups: int, top_groups: int, nodes: int) -> int:
    """The most nodes that hold the experts of a token, if they are in `top_groups` of `groups` equal groups and experts
    are placed on nodes in order of their numbers."""
    touched = sorted(-(-(g + 1) * nodes // groups) - g * nodes // groups for g in range(groups))
    return min(nodes, sum(touched[-top_groups:]))
