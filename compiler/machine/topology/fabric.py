"""The time of every transfer: the topology gives its path, and the rate table gives the rate of that path.

Times depend on the class of a path. No graph is built, so a large cluster costs no more than a small one. World rank r
runs on device r: nodes in the order of the spec, and devices in order within each. Source of the collectives' costs:
R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from typing import Literal, NamedTuple

from compiler.ir import Buffer
from compiler.ir.dtypes import tensor_bytes
from compiler.ir.holders import Holders, Runs

# --- The kinds of links of a cluster, and their rates
#
# NVLink joins the devices of a node. Device i of every node has a NIC on rail i. Each rail is a separate fat tree:
# `LEAF` nodes on a leaf switch, leaves joined by spines and, if the spines have too few ports, spines joined by a core.
# Traffic changes rails inside a node. This is DeepSeek-V3's network (arXiv 2505.09343, §5.1: eight planes, two layers).

LEAF = 32  # nodes on a leaf switch: half of the 64 ports of a 400G switch
POD = LEAF * LEAF * 2  # nodes under the spines of one pod, which has 64 leaves; larger clusters have a core
LEVELS = ("nvlink", "leaf", "spine", "core")  # of links and switches, lowest first
# Latency of one more layer of switches: arXiv 2505.09343, table 5, InfiniBand under one leaf 2.8 µs, between two 3.7.
LAYER_S = 0.9e-6
LARGE = 2**30  # bytes of a message that is large enough to reach a link's bandwidth
Point = tuple[tuple[int, ...], float]  # (ranks, bytes that each rank sends), byte/s; () stands for all sizes


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Achieved byte/s per direction, and seconds until the first byte arrives."""

    bandwidth: float
    latency_s: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds that one message takes."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, eq=False)
class NodeLinks:
    """Achieved rates of the links of one kind of node, as `rates_of` reads them (compiler/plan/spec_rates.py).

    Transfers are `message`, `all_reduce`, `dispatch` and `combine`. A class is a transfer within a node or over the
    network, such as "message_node".
    """

    points: Mapping[str, tuple[Point, ...]]  # by class
    seconds: Mapping[str, float]  # latency_node, latency_network (under one leaf), exchange_node, exchange_network
    congestion: float = 0.0  # share of the bandwidth that is lost at each layer of switches above the leaf

    def rate(self, transfer: str, level: str, num_bytes: float, ranks: int = 2) -> float:
        """Byte/s of a transfer over a level in which each of `ranks` sends `num_bytes`."""
        rate = link_rate_at(self.points[f"{transfer}_{scope_of(level)}"], ranks, num_bytes)
        return rate * (1 - self.congestion) ** _layers_above_leaf(level)

    def latency_of(self, level: str) -> float:
        """Seconds of latency of a path on one rail whose highest level is `level`."""
        return self.seconds[f"latency_{scope_of(level)}"] + _layers_above_leaf(level) * LAYER_S


def _layers_above_leaf(level: str) -> int:
    return max(0, LEVELS.index(level) - LEVELS.index("leaf"))


def scope_of(level: str) -> str:
    """The last part of a class name such as "message_node": "node" within a node, "network" over the network."""
    return "node" if level == "nvlink" else "network"


def link_rate_at(points: Sequence[Point], ranks: int, num_bytes: float) -> float:
    """The rate of a transfer in which each of `ranks` sends `num_bytes`: interpolated by bytes, then by ranks.

    Beyond the first or last row, the rate is constant.
    """
    sizes = sorted({shape[0] for shape, _ in points if shape})
    if not sizes:
        return points[0][1]
    by_ranks = []
    for size in sizes:
        of_size = sorted((shape[1], rate) for shape, rate in points if shape and shape[0] == size)
        by_ranks.append((size, _interpolate(of_size, num_bytes)))
    return _interpolate(by_ranks, ranks)


def _interpolate(points: Sequence[tuple[int, float]], size: float) -> float:
    """The value at `size`: linear in its logarithm between neighbours, and constant beyond the ends."""
    right = bisect_left([x for x, _ in points], size)
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (a, low), (b, high) = points[right - 1], points[right]
    share = log2(size / a) / log2(b / a)
    return low + (high - low) * share


# --- fabric

ReductionKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class NodeRun:
    """Consecutive nodes of one kind."""

    count: int
    devices: int  # of each node
    links: NodeLinks


class DevicePosition(NamedTuple):
    """Where a device is."""

    node: int
    rail: int  # also its position in the node
    kind: NodeRun


class TransferRoute(NamedTuple):
    """The path of a message between two devices."""

    levels: tuple[str, ...]  # that it crosses
    ends: tuple[NodeLinks, NodeLinks]  # links of the nodes at both ends
    forwards: tuple[NodeLinks, ...]  # links of the nodes that can forward it to another rail


@dataclass(frozen=True, slots=True)
class Spread:
    """How the members of a group are spread over nodes."""

    nodes: int
    max_members: int  # members on the fullest node
    min_members: int  # members on the emptiest node


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The ranks with which a device exchanges routed rows, and the size of a row in transit.

    A row goes `network_copies` times over the network. As in DeepEP's figures, a copy to the sender's own node counts.
    An element has `dispatch_bytes` on the way to its expert and `combine_bytes` on the way back, with its scales.
    """

    members: Sequence[int]  # world ranks
    spread: Spread
    network_copies: float = 0.0
    dispatch_bytes: float = 4.0
    combine_bytes: float = 4.0


@dataclass(frozen=True)
class Fabric:
    """The devices of a cluster and the links between them, at the rates of a table (`Rates.fabric`)."""

    nodes: tuple[NodeRun, ...]

    @property
    def num_devices(self) -> int:
        return sum(run.count * run.devices for run in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(run.count for run in self.nodes)

    def place(self, device: int) -> DevicePosition:
        """The node and the rail of a device. Raises IndexError if the cluster has no such device."""
        first_node = 0
        for run in self.nodes:
            if device < run.count * run.devices:
                node, rail = divmod(device, run.devices)
                return DevicePosition(first_node + node, rail, run)
            device -= run.count * run.devices
            first_node += run.count
        raise IndexError("the cluster has no such device")

    # ------------------------------------------------------------ paths

    def path(self, a: int, b: int) -> tuple[str, ...]:
        """The levels that a message crosses: () on one device, ("leaf", "nvlink") to another rail under one leaf."""
        return _route(self.place(a), self.place(b)).levels if a != b else ()

    def link(self, a: int, b: int, num_bytes: float = LARGE) -> LinkRate | None:
        """The path of a message as one link, with the least bandwidth and the sum of latencies; None on one device."""
        return _join_links(_route(self.place(a), self.place(b)), num_bytes) if a != b else None

    def message_s(self, a: int, b: int, num_bytes: float, count: int = 1) -> float:
        """Seconds until the messages from a + i to b + i, for i < count, have all arrived if they are sent at once.

        It is 0 if a and b are one device.
        """
        if a == b:
            return 0.0
        routes = {_route(self.place(a + start), self.place(b + start)) for start, _ in self._runs(a, b, count)}
        return max(_join_links(route, num_bytes).time_s(num_bytes) for route in routes)

    # ------------------------------------------------------------ groups

    def spread(self, members: Collection[int]) -> Spread:
        """How a group is spread over the nodes; in closed form if the group and the nodes are even."""
        if isinstance(members, Holders) and len(self.nodes) == 1:
            even = _even_spread(members, self.nodes[0].devices)
            if even is not None:
                return even
        counts = Counter(self.place(member).node for member in members)
        return Spread(len(counts), max(counts.values()), min(counts.values()))

    def level_of(self, members: Sequence[int]) -> str:
        """The highest level between any two members. `members` ascend, so it is that between the first and the last."""
        a, b = self.place(members[0]).node, self.place(members[-1]).node
        return "nvlink" if a == b else level_between(a, b)

    def node_links(self, members: Sequence[int]) -> tuple[NodeLinks, ...]:
        """The links of all kinds of nodes from the first to the last member. `members` ascend."""
        a, b = self.place(members[0]).node, self.place(members[-1]).node
        starts = [0, *accumulate(run.count for run in self.nodes)]
        return tuple(run.links for run in self.nodes[bisect_right(starts, a) - 1 : bisect_right(starts, b)])

    def reduce_s(self, num_bytes: float, holders: Sequence[int], kind: ReductionKind = "all_reduce") -> float:
        """Seconds to sum a buffer of `num_bytes` over its holders, or to gather it from them; 0 for one holder.

        A `reduce_scatter` leaves each holder its part of the sum, an `all_gather` gives each holder all parts, and an
        `all_reduce` is both. A sum has two phases. Inside each node, each of its g holders sums an equal part. Between
        nodes, each part is summed over the NICs of its holders. An `all_gather` has the phases in reverse order.

        In a phase with n members, a rank sends (n − 1) / n of the phase's bytes, twice that in an `all_reduce`, in
        n − 1 steps (ring) or log2 n steps (recursive halving), whichever is fewer. A rate measured with two ranks holds
        for n ranks, as it is a rate of the bytes that a rank sends.
        """
        if len(holders) < 2:
            return 0.0
        spread, kinds, passes = self.spread(holders), self.node_links(holders), 2 if kind == "all_reduce" else 1

        def phase_s(num_bytes: float, members: int, level: str) -> float:
            if members < 2:
                return 0.0
            sent, steps = passes * num_bytes * (members - 1) / members, min(members - 1, (members - 1).bit_length())
            latency = passes * steps * max(links.latency_of(level) for links in kinds)
            return latency + sent / min(links.rate("all_reduce", level, sent, members) for links in kinds)

        inside = phase_s(num_bytes, spread.max_members, "nvlink")
        return inside + phase_s(num_bytes / spread.min_members, spread.nodes, self.level_of(holders))

    def exchange_s(self, experts: ExpertTraffic, to_experts: bool, buffers: Iterable[Buffer], rows: int) -> float:
        """Seconds of an all-to-all in which each member sends `rows` routed rows of these buffers; 0 for one member.

        Rows cross the links of a node while copies cross the network; the slower of the two counts.
        """
        if len(experts.members) < 2:
            return 0.0
        direction = "dispatch" if to_experts else "combine"
        sent = rows * sum(tensor_bytes(("R", *b.shape[1:]), b.dtype) for b in buffers)
        spread, kinds, ranks = experts.spread, self.node_links(experts.members), len(experts.members)

        def carried_s(num_bytes: float, level: str) -> float:
            return num_bytes / min(links.rate(direction, level, num_bytes, ranks) for links in kinds)

        inside = carried_s(sent, "nvlink") if spread.max_members > 1 else 0.0
        if spread.nodes == 1:
            return max(links.seconds["exchange_node"] for links in kinds) + inside
        between = carried_s(sent * experts.network_copies, self.level_of(experts.members))
        return max(links.seconds["exchange_network"] for links in kinds) + max(inside, between)

    # ------------------------------------------------------------ classes of many paths

    def levels(self, a: int, b: int, count: int) -> Counter[str]:
        """How often each level is crossed by messages from a + i to b + i for i < count."""
        counts: Counter[str] = Counter()
        for start, length in self._runs(a, b, count):
            counts.update({level: length for level in self.path(a + start, b + start)})
        return counts

    def _runs(self, a: int, b: int, count: int) -> Iterator[tuple[int, int]]:
        """(start, length) of each run of i in which all a + i are on one node and all b + i on one node."""
        start = 0
        while start < count:
            length = min(count - start, self._devices_to_node_end(a + start), self._devices_to_node_end(b + start))
            yield start, length
            start += length

    def _devices_to_node_end(self, device: int) -> int:
        """Devices from this one to the end of its node."""
        for run in self.nodes:
            if device < run.count * run.devices:
                return run.devices - device % run.devices
            device -= run.count * run.devices
        raise IndexError("the cluster has no such device")


def _route(a: DevicePosition, b: DevicePosition) -> TransferRoute:
    """The route between two devices."""
    ends = (a.kind.links, b.kind.links)
    if a.node == b.node:
        return TransferRoute(("nvlink",), ends, ())
    level = level_between(a.node, b.node)
    if a.rail == b.rail:
        return TransferRoute((level,), ends, ())
    reached = ((a.kind, b.rail), (b.kind, a.rail))  # a node has a NIC on as many rails as devices
    return TransferRoute((level, "nvlink"), ends, tuple(kind.links for kind, rail in reached if rail < kind.devices))


def _join_links(route: TransferRoute, num_bytes: float) -> LinkRate:
    """A route as one link for messages of a size. A change of rails happens at the end where it takes less time."""
    level = route.levels[0]
    bandwidth = min(links.rate("message", level, num_bytes) for links in route.ends)
    latency = sum(links.latency_of(level) for links in route.ends) / 2  # half of it lies at each end
    detours = [
        LinkRate(min(bandwidth, links.rate("message", "nvlink", num_bytes)), latency + links.latency_of("nvlink"))
        for links in route.forwards
    ]
    return min(detours, key=lambda link: link.time_s(num_bytes), default=LinkRate(bandwidth, latency))


def level_between(node_a: int, node_b: int) -> str:
    """The lowest level of switches that joins two different nodes."""
    if node_a // LEAF == node_b // LEAF:
        return "leaf"
    return "spine" if node_a // POD == node_b // POD else "core"


def _even_spread(holders: Holders, devices: int) -> Spread | None:
    """The spread of holders that are alike on each of their nodes; None if this closed form does not apply."""
    pipelines, per_rank = len(holders.pipeline_ranks), len(holders.columns)
    if not per_rank or holders.width % devices or isinstance(holders.columns, Runs):
        return None
    step = holders.columns.step
    if step % devices == 0 or per_rank == 1:
        return Spread(pipelines * per_rank, 1, 1)
    members = devices // step if devices % step == 0 else 0
    if not members or per_rank % members or holders.columns.start % devices >= step:
        return None
    return Spread(pipelines * (per_rank // members), members, members)
