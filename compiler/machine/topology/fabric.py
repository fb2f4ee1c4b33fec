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
from typing import Literal

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
LEVELS = ("nvlink", "leaf", "spine", "core")  # the highest level a path crosses, cheapest first
# Of one more layer of switches: arXiv 2505.09343, table 5, InfiniBand under one leaf 2.8 µs, between leaves 3.7 µs.
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

    def rate(self, transfer: str, level: str, num_bytes: float, ranks: int = 2) -> float:
        """Byte/s of a transfer over a level in which each of `ranks` sends `num_bytes`."""
        return link_rate_at(self.points[f"{transfer}_{place_of(level)}"], ranks, num_bytes)

    def latency_of(self, level: str) -> float:
        """Seconds of latency of a path on one rail whose highest level is `level`."""
        layers = max(0, LEVELS.index(level) - 1)
        return self.seconds[f"latency_{place_of(level)}"] + layers * LAYER_S


def place_of(level: str) -> str:
    """The place of a level in the class names of a table: within a node, or over the network."""
    return "node" if level == "nvlink" else "network"


def link_rate_at(points: Sequence[Point], ranks: int, num_bytes: float) -> float:
    """The rate of a transfer in which each of `ranks` sends `num_bytes`: interpolated by bytes, then by ranks.

    Beyond the first or last row, the rate is constant.
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
    """The value at `at`: linear in its logarithm between neighbours, and constant beyond the ends."""
    right = bisect_left([x for x, _ in points], at)
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (a, low), (b, high) = points[right - 1], points[right]
    share = log2(at / a) / log2(b / a)
    return low + (high - low) * share


# --- fabric

ReductionKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Nodes:
    """A run of equal nodes."""

    count: int
    devices: int
    links: NodeLinks


Place = tuple[int, int, Nodes]  # node, position in it, its kind
# The levels that are crossed, the links at both ends, and the links of the nodes that can forward to another rail.
Route = tuple[tuple[str, ...], tuple[NodeLinks, NodeLinks], tuple[NodeLinks, ...]]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the members of a group are spread over nodes."""

    nodes: int
    most: int  # members on the fullest node
    least: int  # members on the emptiest node


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

    nodes: tuple[Nodes, ...]

    @property
    def num_devices(self) -> int:
        return sum(nodes.count * nodes.devices for nodes in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(nodes.count for nodes in self.nodes)

    def place(self, device: int) -> Place:
        """(node, position in it, kind of node) of a device. Its position is its rail."""
        first_node = 0
        for nodes in self.nodes:
            if device < nodes.count * nodes.devices:
                node, position = divmod(device, nodes.devices)
                return first_node + node, position, nodes
            device -= nodes.count * nodes.devices
            first_node += nodes.count
        raise IndexError("the cluster has no such device")

    # ------------------------------------------------------------ paths

    def path(self, a: int, b: int) -> tuple[str, ...]:
        """The levels that a message crosses: () on one device, ("leaf", "nvlink") to another rail under one leaf."""
        return _route(self.place(a), self.place(b))[0] if a != b else ()

    def link(self, a: int, b: int, num_bytes: float = LARGE) -> LinkRate | None:
        """The path of a message as one link, with the least bandwidth and the sum of latencies; None on one device."""
        return _joined(_route(self.place(a), self.place(b)), num_bytes) if a != b else None

    def message_s(self, a: int, b: int, num_bytes: float, count: int = 1) -> float:
        """Seconds until the messages from a + i to b + i, for i < count, have all arrived if they are sent at once.

        It is 0 if a and b are one device.
        """
        if a == b:
            return 0.0
        routes = {_route(self.place(a + at), self.place(b + at)) for at, _ in self._runs(a, b, count)}
        return max(_joined(route, num_bytes).time_s(num_bytes) for route in routes)

    # ------------------------------------------------------------ groups

    def spread(self, members: Collection[int]) -> Spread:
        """How a group is spread over the nodes; in closed form if the group and the nodes are even."""
        if isinstance(members, Holders) and len(self.nodes) == 1:
            even = _even_spread(members, self.nodes[0].devices)
            if even is not None:
                return even
        counts = Counter(self.place(member)[0] for member in members)
        return Spread(len(counts), max(counts.values()), min(counts.values()))

    def level_of(self, members: Sequence[int]) -> str:
        """The highest level that a group needs: the level between its first and its last member."""
        a, b = self.place(members[0])[0], self.place(members[-1])[0]
        return "nvlink" if a == b else level_between(a, b)

    def kinds(self, members: Sequence[int]) -> tuple[NodeLinks, ...]:
        """The links of all kinds of nodes from a group's first to its last member."""
        a, b = self.place(members[0])[0], self.place(members[-1])[0]
        starts = [0, *accumulate(nodes.count for nodes in self.nodes)]
        return tuple(nodes.links for nodes in self.nodes[bisect_right(starts, a) - 1 : bisect_right(starts, b)])

    def reduce_s(self, num_bytes: float, holders: Sequence[int], kind: ReductionKind = "all_reduce") -> float:
        """Seconds to sum a buffer of `num_bytes` over its holders, or to gather it from them; 0 for one holder.

        A `reduce_scatter` leaves each holder its part of the sum, an `all_gather` gives each holder all parts, and an
        `all_reduce` is both. The sum goes first through each node, where each of its g holders gets the sum of an equal
        part, and then over the network, where the n nodes sum each part over the NIC of its holder. Each of the two is
        a ring or recursive halving: (n − 1) / n of the bytes, in n − 1 or log2 n steps, whichever is fewer. An
        `all_gather` goes the reverse way. A row measured on two ranks therefore holds for n: a link carries what a rank
        sends, twice (n − 1) / n of the buffer in an `all_reduce`, at the row's rate.
        """
        if len(holders) < 2:
            return 0.0
        spread, kinds, ways = self.spread(holders), self.kinds(holders), 2 if kind == "all_reduce" else 1

        def ring_s(whole: float, members: int, level: str) -> float:
            if members < 2:
                return 0.0
            sent, steps = ways * whole * (members - 1) / members, min(members - 1, (members - 1).bit_length())
            latency = ways * steps * max(links.latency_of(level) for links in kinds)
            return latency + sent / min(links.rate("all_reduce", level, sent, members) for links in kinds)

        inside = ring_s(num_bytes, spread.most, "nvlink")
        return inside + ring_s(num_bytes / spread.least, spread.nodes, self.level_of(holders))

    def exchange_s(self, experts: ExpertTraffic, to_experts: bool, buffers: Iterable[Buffer], rows: int) -> float:
        """Seconds of an all-to-all in which each member sends `rows` routed rows of these buffers; 0 for one member.

        Rows cross the links of a node while copies cross the network; the slower of the two counts.
        """
        if len(experts.members) < 2:
            return 0.0
        way = "dispatch" if to_experts else "combine"
        sent = rows * sum(tensor_bytes(("R", *b.shape[1:]), b.dtype) for b in buffers)
        spread, kinds, ranks = experts.spread, self.kinds(experts.members), len(experts.members)

        def carried_s(num_bytes: float, level: str) -> float:
            return num_bytes / min(links.rate(way, level, num_bytes, ranks) for links in kinds)

        inside = carried_s(sent, "nvlink") if spread.most > 1 else 0.0
        if spread.nodes == 1:
            return max(links.seconds["exchange_node"] for links in kinds) + inside
        between = carried_s(sent * experts.network_copies, "leaf")
        return max(links.seconds["exchange_network"] for links in kinds) + max(inside, between)

    # ------------------------------------------------------------ classes of many paths

    def levels(self, a: int, b: int, count: int) -> Counter[str]:
        """How often each level is crossed by messages from a + i to b + i for i < count."""
        counts: Counter[str] = Counter()
        for at, run in self._runs(a, b, count):
            counts.update({level: run for level in self.path(a + at, b + at)})
        return counts

    def _runs(self, a: int, b: int, count: int) -> Iterator[tuple[int, int]]:
        """(start, length) of each run of i in which all a + i are on one node and all b + i on one node."""
        at = 0
        while at < count:
            run = min(count - at, self._left(a + at), self._left(b + at))
            yield at, run
            at += run

    def _left(self, device: int) -> int:
        """Devices from this one to the end of its node."""
        for nodes in self.nodes:
            if device < nodes.count * nodes.devices:
                return nodes.devices - device % nodes.devices
            device -= nodes.count * nodes.devices
        raise IndexError("the cluster has no such device")


def _route(a: Place, b: Place) -> Route:
    """The route between two devices."""
    (node_a, rail_a, kind_a), (node_b, rail_b, kind_b) = a, b
    ends = (kind_a.links, kind_b.links)
    if node_a == node_b:
        return ("nvlink",), ends, ()
    level = level_between(node_a, node_b)
    if rail_a == rail_b:
        return (level,), ends, ()
    reached = ((kind_a, rail_b), (kind_b, rail_a))  # a node has a NIC on as many rails as devices
    return (level, "nvlink"), ends, tuple(kind.links for kind, rail in reached if rail < kind.devices)


def _joined(route: Route, num_bytes: float) -> LinkRate:
    """A route as one link for messages of a size. A change of rails happens at the end where it takes less time."""
    (level, *_), ends, forwards = route
    bandwidth = min(links.rate("message", level, num_bytes) for links in ends)
    latency = sum(links.latency_of(level) for links in ends) / 2  # half of it lies at each end
    whole = [
        LinkRate(min(bandwidth, links.rate("message", "nvlink", num_bytes)), latency + links.latency_of("nvlink"))
        for links in forwards
    ]
    return min(whole, key=lambda link: link.time_s(num_bytes), default=LinkRate(bandwidth, latency))


def level_between(node_a: int, node_b: int) -> str:
    """The lowest level of switches that joins two different nodes."""
    if node_a // LEAF == node_b // LEAF:
        return "leaf"
    return "spine" if node_a // POD == node_b // POD else "core"


def _even_spread(holders: Holders, devices: int) -> Spread | None:
    """The spread of holders that are alike on each of their nodes; None if this closed form does not apply."""
    pipelines, each = len(holders.pipeline_ranks), len(holders.columns)
    if not each or holders.width % devices or isinstance(holders.columns, Runs):
        return None
    step = holders.columns.step
    if step % devices == 0 or each == 1:
        return Spread(pipelines * each, 1, 1)
    members = devices // step if devices % step == 0 else 0
    if not members or each % members or holders.columns.start % devices >= step:
        return None
    return Spread(pipelines * (each // members), members, members)
