"""A cluster as an explicit graph, for pictures and to hold the closed form to: every device, NIC and level of switches.

One node stands for the switches of a level that are joined to all below them: they are as wide as what is below.
"""

from __future__ import annotations

import networkx as nx

from compiler.topology.fabric import Fabric
from compiler.topology.links import LEAF, POD, Link

MOST_DEVICES = 4096


def graph_of(fabric: Fabric) -> nx.Graph:
    """Nodes ("device", d), ("nvlink", n), ("nic", d), ("leaf", rail, i), ("spine", rail, i), ("core", rail).

    Edges have `bandwidth` in byte/s and `latency_s`, those of a path sum. Only for at most `MOST_DEVICES`.
    """
    if fabric.num_devices > MOST_DEVICES:
        raise ValueError(f"a graph of {fabric.num_devices:,} devices; it is drawn for at most {MOST_DEVICES:,}")
    graph: nx.Graph = nx.Graph()
    several = fabric.num_nodes > 1
    for device in range(fabric.num_devices):
        node, rail, links = fabric.place(device)
        leaf, pod = node // LEAF, node // POD
        _join(graph, ("device", device), ("nvlink", node), Link(links.nvlink, links.nvlink_s / 2))
        if not several:
            continue
        _join(graph, ("device", device), ("nic", device), Link(links.nic, 0.0))
        _join(graph, ("nic", device), ("leaf", rail, leaf), Link(links.nic, links.leaf_s / 2))
        if fabric.num_nodes > LEAF:
            up = Link(links.nic * LEAF, (links.spine_s - links.leaf_s) / 2)
            _join(graph, ("leaf", rail, leaf), ("spine", rail, pod), up)
        if fabric.num_nodes > POD:
            up = Link(links.nic * POD, (links.core_s - links.spine_s) / 2)
            _join(graph, ("spine", rail, pod), ("core", rail), up)
    return graph


def _join(graph: nx.Graph, a: tuple[object, ...], b: tuple[object, ...], link: Link) -> None:
    """A trunk that is joined by unlike nodes has the wider ones' ports."""
    bandwidth = max(link.bandwidth, graph.edges[a, b]["bandwidth"]) if graph.has_edge(a, b) else link.bandwidth
    graph.add_edge(a, b, bandwidth=bandwidth, latency_s=link.latency_s)
