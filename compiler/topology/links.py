"""The kinds of links of a cluster, and what each carries.

A node's devices are joined by NVLink. Device i of every node has a NIC on rail i, a fat tree of its own: `LEAF` nodes
on a leaf switch, leaves joined by spines, and where those have no more ports, spines by a core. Between rails traffic
crosses inside a node. That is DeepSeek-V3's network (arXiv 2505.09343, §5.1: eight planes, two layers).
"""

from __future__ import annotations

from dataclasses import dataclass

LEAF = 32  # nodes on a leaf switch: half of the 64 ports of a 400G switch
POD = LEAF * LEAF * 2  # nodes under the spines of one pod: 64 leaves of them; more go over a core
LEVELS = ("nvlink", "leaf", "spine", "core")  # the highest level a path crosses, cheapest first

# Shares of peaks that DeepSeek measured on these links, arXiv 2412.19437 and 2505.09343: 160 of 200, 40 of 50 GB/s.
NVLINK_SHARE, NIC_SHARE = 0.80, 0.80
# End to end for 64 bytes, arXiv 2505.09343, table 5: NVLink, InfiniBand under one leaf, and between leaves. A second
# layer of switches adds 0.9 µs; a third is taken to add as much again.
NVLINK_S, LEAF_S, SPINE_S = 3.33e-6, 2.8e-6, 3.7e-6
CORE_S = 2 * SPINE_S - LEAF_S
# Between processes of one machine and over its loopback, gloo: all-to-all of 16 MiB in 19 to 27 ms, a message 0.1 ms.
PROCESS_BYTES, PROCESS_S = 7e8, 1e-4


@dataclass(frozen=True, slots=True)
class Link:
    """Byte/s per direction that are achieved, and seconds until the first byte arrives."""

    bandwidth: float
    latency_s: float

    def time_s(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Links:
    """What devices of one kind of node have. A path takes the slower end's bandwidth."""

    nvlink: float
    nic: float
    nvlink_s: float = NVLINK_S
    leaf_s: float = LEAF_S
    spine_s: float = SPINE_S
    core_s: float = CORE_S

    @staticmethod
    def of(nvlink: float | None, nic: float | None) -> Links:
        """From a node's peaks. What is not named is the other; where neither is, processes talk over one machine."""
        if nvlink is None and nic is None:
            return Links(PROCESS_BYTES, PROCESS_BYTES, PROCESS_S, PROCESS_S, PROCESS_S, PROCESS_S)
        inside, between = nvlink or nic, nic or nvlink
        assert inside is not None and between is not None
        return Links(inside * NVLINK_SHARE, between * NIC_SHARE)

    def latency_of(self, level: str) -> float:
        """Seconds over a path whose highest level this is, on one rail."""
        return {"nvlink": self.nvlink_s, "leaf": self.leaf_s, "spine": self.spine_s, "core": self.core_s}[level]
