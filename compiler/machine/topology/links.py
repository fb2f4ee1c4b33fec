"""The kinds of links of a cluster, and what each carries.

A node's devices are joined by NVLink. Device i of every node has a NIC on rail i, a fat tree of its own: `LEAF` nodes
on a leaf switch, leaves joined by spines, and where those have no more ports, spines by a core. Between rails traffic
crosses inside a node. That is DeepSeek-V3's network (arXiv 2505.09343, §5.1: eight planes, two layers).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2

LEAF = 32  # nodes on a leaf switch: half of the 64 ports of a 400G switch
POD = LEAF * LEAF * 2  # nodes under the spines of one pod: 64 leaves of them; more go over a core
LEVELS = ("nvlink", "leaf", "spine", "core")  # the highest level a path crosses, cheapest first

# A layer of switches more: arXiv 2505.09343, table 5, InfiniBand under one leaf 2.8 µs, and between leaves 3.7 µs.
LAYER_S = 0.9e-6
LARGE = 2**30  # bytes of a message that says what a link carries

Point = tuple[tuple[int, ...], float]  # (ranks, bytes a rank sends), byte/s; () holds for all


@dataclass(frozen=True, slots=True)
class Link:
    """Byte/s per direction that are achieved, and seconds until the first byte arrives."""

    bandwidth: float
    latency_s: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds that one message takes."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What the links of one kind of node achieve, as rates_of reads it from a table (compiler/plan/spec_rates.py).

    Transfers are `message`, `all_reduce`, `dispatch` and `combine`; a class is one of these within a node or over the
    network, as "message_node".
    """

    points: Mapping[str, tuple[Point, ...]]  # by class
    seconds: Mapping[str, float]  # latency_node, latency_network: under one leaf; exchange_node, exchange_network

    def rate(self, transfer: str, level: str, num_bytes: float, ranks: int = 2) -> float:
        """Byte/s of a transfer over a level, in which each of so many ranks sends `num_bytes`."""
        return link_rate_at(self.points[f"{transfer}_{place_of(level)}"], ranks, num_bytes)

    def latency_of(self, level: str) -> float:
        """Seconds over a path whose highest level this is, on one rail."""
        layers = max(0, LEVELS.index(level) - 1)
        return self.seconds[f"latency_{place_of(level)}"] + layers * LAYER_S


def place_of(level: str) -> str:
    """The place of a level in the class names of a table: within a node, or over the network."""
    return "node" if level == "nvlink" else "network"


def link_rate_at(points: Sequence[Point], ranks: int, num_bytes: float) -> float:
    """The rate of a transfer between `ranks` of so many bytes a rank: interpolated by bytes, then by ranks.

    Each ends at the last row.
    """
    sizes = sorted({at[0] for at, _ in points if at})
    if not sizes:
        return points[0][1]
    by_ranks = []
    for size in sizes:
        of_size = sorted((at[1], rate) for at, rate in points if at and at[0] == size)
        by_ranks.append((size, _between(of_size, num_bytes)))
    return _between(by_ranks, ranks)


def _between(points: Sequence[tuple[int, float]], at: float) -> float:
    """The value at a place: linear in its logarithm between neighbours, constant beyond the ends."""
    right = bisect_left([x for x, _ in points], at)
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (a, low), (b, high) = points[right - 1], points[right]
    share = log2(at / a) / log2(b / a)
    return low + (high - low) * share
