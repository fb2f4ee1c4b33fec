"""The accelerators whose peaks need not be written: a `device` of such a name has those of the maker's data sheet.

Peaks are dense: data sheets since Hopper print products with sparsity, which is twice as much. SXM modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

FIELDS = ("sms", "hbm", "bf16", "fp8", "fp4")


@dataclass(frozen=True)
class Peaks:
    """Peaks of a device: streaming multiprocessors, byte/s, FLOP/s. `source`: the data sheet that they are from."""

    source: str
    sms: int
    hbm: float
    bf16: float
    fp8: float | None = None  # None: it does not multiply in it
    fp4: float | None = None


# SMs: architecture white papers of NVIDIA A100 (2020) and H100 (2022). An H800 is an H100 with slower NVLink, arXiv
# 2505.09343, section 2. A B200 has 18,944 CUDA cores, 128 of them in an SM; for AMD, compute units are SMs.
PEAKS: Mapping[str, Peaks] = {
    "a100": Peaks("NVIDIA A100 80GB SXM data sheet", 108, 2.039e12, 312e12),
    "h100": Peaks("NVIDIA H100 SXM data sheet", 132, 3.35e12, 989e12, 1979e12),
    "h200": Peaks("NVIDIA H200 SXM data sheet", 132, 4.8e12, 989e12, 1979e12),
    "h800": Peaks("NVIDIA H100 SXM data sheet, which H800 differs from in NVLink", 132, 3.35e12, 989e12, 1979e12),
    "b200": Peaks("NVIDIA HGX B200 data sheet", 148, 7.7e12, 2250e12, 4500e12, 9000e12),
    "gb200": Peaks("NVIDIA GB200 NVL72 data sheet, a GPU of it", 148, 8e12, 2500e12, 5000e12, 10000e12),
    "mi300x": Peaks("AMD Instinct MI300X data sheet", 304, 5.3e12, 1307e12, 2615e12),
}


def peaks_of(name: str) -> Peaks | None:
    """The peaks of a device by its name, in capitals or not; None where they are not known."""
    return PEAKS.get(name.lower())


# --- How expert groups lie on the nodes of a cluster, and how many of these the experts of a token reach
#
# World ranks are laid on devices in their order, so an expert group is a run of devices.


def group_nodes(devices: int, expert: int) -> int | None:
    """Nodes of so many devices that each expert group lies on: one, or several that it fills. None where groups begin
    or end inside of a node that they do not lie in whole."""
    if devices % expert == 0:
        return 1
    return expert // devices if expert % devices == 0 else None


def most_group_nodes(sizes: Iterable[int], expert: int) -> int | None:
    """`group_nodes` of the nodes on which a group lies on most, of nodes of several sizes; None where any has none."""
    found = [group_nodes(devices, expert) for devices in sizes]
    return None if None in found else max(each for each in found if each is not None)


def groups_fall(groups: int, nodes: int) -> bool:
    """Whether each of the nodes has whole groups of experts, or each group has whole nodes."""
    return groups % nodes == 0 or nodes % groups == 0


@cache
def reached(groups: int, top_groups: int, nodes: int) -> int:
    """The most nodes that the experts of a token lie on, if they are in `top_groups` of `groups` equal groups, and the
    experts lie on the nodes by their number."""
    touched = sorted(-(-(g + 1) * nodes // groups) - g * nodes // groups for g in range(groups))
    return min(nodes, sum(touched[-top_groups:]))
