"""Prices of transfers between the devices of a cluster, by class of path: nothing is built, so size costs nothing.

World rank r runs on device r: nodes in the order of the spec, devices in order within each. Source of the collectives'
costs: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from compiler.holders import Holders
from compiler.topology.links import LEAF, POD, Link, Links
from dsl.schema import Cluster

Reduction = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes that follow one another."""

    count: int
    devices: int
    links: Links


@dataclass(frozen=True, slots=True)
class Spread:
    """How members of a group lie: on how many nodes, and on the fullest and the emptiest of them how many."""

    nodes: int
    most: int
    least: int


@dataclass(frozen=True)
class Fabric:
    """The devices of a cluster and what joins them."""

    nodes: tuple[Nodes, ...]

    @staticmethod
    def of(cluster: Cluster) -> Fabric:
        """At the achieved shares of the spec's peaks (links.py)."""
        return Fabric(
            tuple(Nodes(count, node.devices, Links.of(node.nvlink, node.nic)) for count, node in cluster.parts)
        )

    @property
    def num_devices(self) -> int:
        return sum(nodes.count * nodes.devices for nodes in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(nodes.count for nodes in self.nodes)

    def place(self, device: int) -> tuple[int, int, Links]:
        """(node, position in it, links) of a device. Its position is its rail."""
        first_node = 0
        for nodes in self.nodes:
            if device < nodes.count * nodes.devices:
                node, position = divmod(device, nodes.devices)
                return first_node + node, position, nodes.links
            device -= nodes.count * nodes.devices
            first_node += nodes.count
        raise IndexError("the cluster has no such device")

    # ------------------------------------------------------------ paths

    def path(self, a: int, b: int) -> tuple[str, ...]:
        """The levels a message crosses, inside a node last: () on one device, ("leaf", "nvlink") to another rail."""
        if a == b:
            return ()
        (node_a, rail_a, _), (node_b, rail_b, _) = self.place(a), self.place(b)
        if node_a == node_b:
            return ("nvlink",)
        return (level_between(node_a, node_b), *(("nvlink",) if rail_a != rail_b else ()))

    def link(self, a: int, b: int) -> Link | None:
        """The whole path as one link: its narrowest part, its latencies summed. None on one device."""
        path = self.path(a, b)
        if not path:
            return None
        ends = self.place(a)[2], self.place(b)[2]
        between = path[0] != "nvlink"
        bandwidth = min(links.nic if between else links.nvlink for links in ends)
        latency = max(links.latency_of(path[0]) for links in ends)
        if len(path) > 1:  # forwarded in the node of either end, where that is better
            inside = [(links.nvlink, -links.nvlink_s) for links in ends]
            widest, least = max(inside)
            bandwidth, latency = min(bandwidth, widest), latency - least
        return Link(bandwidth, latency)

    def message_s(self, a: int, b: int, num_bytes: float) -> float:
        """Seconds of a message of device a to device b; 0 on one device, where nothing is sent."""
        link = self.link(a, b)
        return link.time_s(num_bytes) if link else 0.0

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

    def worst(self, members: Sequence[int], spread: Spread) -> tuple[Link, Link]:
        """The slowest (link inside a node, link between nodes) of a group."""
        first, last = members[0], members[-1]
        a, b = self.place(first)[0], self.place(last)[0]
        level = level_between(a, b) if spread.nodes > 1 else "nvlink"
        starts = [0, *accumulate(nodes.count for nodes in self.nodes)]
        kinds = (
            self.nodes if len(self.nodes) == 1 else self.nodes[bisect_right(starts, a) - 1 : bisect_right(starts, b)]
        )
        inside = Link(min(k.links.nvlink for k in kinds), max(k.links.nvlink_s for k in kinds))
        return inside, Link(min(k.links.nic for k in kinds), max(k.links.latency_of(level) for k in kinds))

    def reduce_s(self, num_bytes: float, holders: Sequence[int], kind: Reduction = "all_reduce") -> float:
        """Seconds to sum a buffer of `num_bytes` over its holders, or to gather it from them; 0 of one holder.

        kind: `reduce_scatter` leaves each holder its part of the sum, `all_gather` gives each all parts, `all_reduce`
        is both. Inside each node first: each of its g holders gets the sum of an equal part; then over the network,
        where a part is summed among the n nodes over the NIC of its holder. Each is a ring or recursive halving: (n −
        1) / n of the bytes, in n − 1 or log2 n steps, whichever has fewer. An `all_gather` is the way back.
        """
        if len(holders) < 2:
            return 0.0
        spread = self.spread(holders)
        inside, between = self.worst(holders, spread)
        once = _halving_s(num_bytes, spread.most, inside) + _halving_s(num_bytes / spread.least, spread.nodes, between)
        return 2 * once if kind == "all_reduce" else once

    def all_to_all_s(self, sent_bytes: float, members: Sequence[int], network_bytes: float | None = None) -> float:
        """Seconds of an all-to-all in which each member sends `sent_bytes` in all, evenly to all and to itself.

        `network_bytes`: what of that each member sends to other nodes, where rows for several members of a node cross
        once and are copied there; else what goes to members elsewhere. Both networks carry at the same time.
        """
        if len(members) < 2:
            return 0.0
        spread, count = self.spread(members), len(members)
        inside, between = self.worst(members, spread)
        outside = sent_bytes * (count - spread.least) / count if network_bytes is None else network_bytes
        in_node = sent_bytes * (spread.most - 1) / count if network_bytes is None else sent_bytes
        over_nvlink = inside.time_s(in_node) if spread.most > 1 else 0.0
        return max(over_nvlink, between.time_s(outside)) if spread.nodes > 1 else over_nvlink

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


def level_between(node_a: int, node_b: int) -> str:
    """The level of switches at which the paths of two different nodes meet."""
    if node_a // LEAF == node_b // LEAF:
        return "leaf"
    return "spine" if node_a // POD == node_b // POD else "core"


def _halving_s(num_bytes: float, members: int, link: Link) -> float:
    if members < 2:
        return 0.0
    steps = min(members - 1, (members - 1).bit_length())
    return steps * link.latency_s + num_bytes * (members - 1) / members / link.bandwidth


def _even_spread(holders: Holders, devices: int) -> Spread | None:
    """Of holders that lie on every node of theirs alike; None where that is not seen at once."""
    step, pipelines, each = holders.data_ranks.step, len(holders.pipeline_ranks), len(holders.data_ranks)
    if not each or holders.dp % devices:
        return None
    if step % devices == 0 or each == 1:
        return Spread(pipelines * each, 1, 1)
    members = devices // step if devices % step == 0 else 0
    if not members or each % members or holders.data_ranks.start % devices >= step:
        return None
    return Spread(pipelines * (each // members), members, members)
