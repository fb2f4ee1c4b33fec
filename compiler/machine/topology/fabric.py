"""The one price of every transfer: its path from the topology, what that path achieves from the rate table.

Prices are by class of path: nothing is built, so size costs nothing. World rank r runs on device r: nodes in the order
of the spec, devices in order within each. Source of the collectives' costs: R. Thakur, R. Rabenseifner, W. Gropp,
Optimization of collective communication operations in MPICH, 2005.
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

# --- The kinds of links of a cluster, and what each carries
#
# A node's devices are joined by NVLink. Device i of every node has a NIC on rail i, a fat tree of its own: `LEAF` nodes
# on a leaf switch, leaves joined by spines, and where those have no more ports, spines by a core. Between rails traffic
# crosses inside a node. That is DeepSeek-V3's network (arXiv 2505.09343, §5.1: eight planes, two layers).

LEAF = 32  # nodes on a leaf switch: half of the 64 ports of a 400G switch
POD = LEAF * LEAF * 2  # nodes under the spines of one pod: 64 leaves of them; more go over a core
LEVELS = ("nvlink", "leaf", "spine", "core")  # the highest level a path crosses, cheapest first
# A layer of switches more: arXiv 2505.09343, table 5, InfiniBand under one leaf 2.8 µs, and between leaves 3.7 µs.
LAYER_S = 0.9e-6
LARGE = 2**30  # bytes of a message that says what a link carries
Point = tuple[tuple[int, ...], float]  # (ranks, bytes a rank sends), byte/s; () holds for all


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Byte/s per direction that are achieved, and seconds until the first byte arrives."""

    bandwidth: float
    latency_s: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds that one message takes."""
        return self.latency_s + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, eq=False)
class NodeLinks:
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


# --- fabric

ReductionKind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that follow one another."""

    count: int
    devices: int
    links: NodeLinks


Place = tuple[int, int, Nodes]  # node, position in it, its kind
# Levels that are crossed, links of both ends, and of the nodes that can forward to another rail.
Route = tuple[tuple[str, ...], tuple[NodeLinks, NodeLinks], tuple[NodeLinks, ...]]


@dataclass(frozen=True, slots=True)
class Spread:
    """How members of a group lie: on how many nodes, and on the fullest and the emptiest of them how many."""

    nodes: int
    most: int
    least: int


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Whom a device exchanges routed rows with, and what of each row travels.

    A row goes `network_copies` times over the network; as in DeepEP's figures, a copy to the own node is counted. It
    has `dispatch_bytes` an element on the way to its expert and `combine_bytes` back, scales among them.
    """

    members: Sequence[int]  # world ranks
    spread: Spread
    network_copies: float = 0.0
    dispatch_bytes: float = 4.0
    combine_bytes: float = 4.0


@dataclass(frozen=True)
class Fabric:
    """The devices of a cluster and what joins them, at what a rate table says (rates_of has it as `fabric`)."""

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
        """The levels a message crosses, inside a node last: () on one device, ("leaf", "nvlink") to another rail."""
        return _route(self.place(a), self.place(b))[0] if a != b else ()

    def link(self, a: int, b: int, num_bytes: float = LARGE) -> LinkRate | None:
        """The whole path of a message as one link: its narrowest part, its latencies summed. None on one device."""
        return _joined(_route(self.place(a), self.place(b)), num_bytes) if a != b else None

    def message_s(self, a: int, b: int, num_bytes: float, count: int = 1) -> float:
        """Seconds until the last of the messages from a + i to b + i, i < count, is there, all sent at once.

        0 on one device, where nothing is sent.
        """
        if a == b:
            return 0.0
        routes = {_route(self.place(a + at), self.place(b + at)) for at, _ in self._runs(a, b, count)}
        return max(_joined(route, num_bytes).time_s(num_bytes) for route in routes)

    # ------------------------------------------------------------ groups

    def spread(self, members: Collection[int]) -> Spread:
        """How a group lies on the nodes; in closed form where the group and the nodes are even."""
        if isinstance(members, Holders) and len(self.nodes) == 1:
            found = _even_spread(members, self.nodes[0].devices)
            if found is not None:
                return found
        counts = Counter(self.place(member)[0] for member in members)
        return Spread(len(counts), max(counts.values()), min(counts.values()))

    def level_of(self, members: Sequence[int]) -> str:
        """The highest level that a group needs: that between its first and its last member, or within a node."""
        a, b = self.place(members[0])[0], self.place(members[-1])[0]
        return "nvlink" if a == b else level_between(a, b)

    def kinds(self, members: Sequence[int]) -> tuple[NodeLinks, ...]:
        """Links of the nodes between a group's first and its last member."""
        a, b = self.place(members[0])[0], self.place(members[-1])[0]
        starts = [0, *accumulate(nodes.count for nodes in self.nodes)]
        return tuple(nodes.links for nodes in self.nodes[bisect_right(starts, a) - 1 : bisect_right(starts, b)])

    def reduce_s(self, num_bytes: float, holders: Sequence[int], kind: ReductionKind = "all_reduce") -> float:
        """Seconds to sum a buffer of `num_bytes` over its holders, or to gather it from them; 0 of one holder.

        kind: `reduce_scatter` leaves each holder its part of the sum, `all_gather` gives each all parts, `all_reduce`
        is both. Inside each node first: each of its g holders gets the sum of an equal part; then over the network,
        where a part is summed among the n nodes over the NIC of its holder. Each is a ring or recursive halving: (n −
        1) / n of the bytes, in n − 1 or log2 n steps, whichever has fewer. An `all_gather` is the way back. So a row
        of two ranks holds for n: a link carries what a rank sends, twice (n − 1) / n of the buffer, at the row's rate.
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
        """Seconds of an all-to-all of `rows` routed rows of these buffers that each member sends; 0 of one member.

        Every row goes over the links of a node, copies over the network beside it: the slower of both counts.
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
        found: Counter[str] = Counter()
        for at, run in self._runs(a, b, count):
            found.update({level: run for level in self.path(a + at, b + at)})
        return found

    def _runs(self, a: int, b: int, count: int) -> Iterator[tuple[int, int]]:
        """(start, length) of the i whose a + i are on one node and b + i on one."""
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
    """A route as one link for messages of a size. They change rails in the node where that takes less time."""
    (level, *_), ends, forwards = route
    bandwidth = min(links.rate("message", level, num_bytes) for links in ends)
    latency = sum(links.latency_of(level) for links in ends) / 2  # half of it lies at each end
    whole = [
        LinkRate(min(bandwidth, links.rate("message", "nvlink", num_bytes)), latency + links.latency_of("nvlink"))
        for links in forwards
    ]
    return min(whole, key=lambda link: link.time_s(num_bytes), default=LinkRate(bandwidth, latency))


def level_between(node_a: int, node_b: int) -> str:
    """The level of switches at which the paths of two different nodes meet."""
    if node_a // LEAF == node_b // LEAF:
        return "leaf"
    return "spine" if node_a // POD == node_b // POD else "core"


def _even_spread(holders: Holders, devices: int) -> Spread | None:
    """The spread of holders that lie on each of their nodes in the same way; None where that takes more to see."""
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
