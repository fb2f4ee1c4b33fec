"""A cluster as an explicit graph of every device, NIC and level of switches, for pictures and to test the closed form.

One graph node stands for all switches of a level that connect the same switches below; it has their full bandwidth.
"""

from __future__ import annotations

import networkx as nx

from compiler.machine.topology.fabric import LARGE, LEAF, POD, Fabric, LinkRate

MOST_DEVICES = 4096


def graph_of(fabric: Fabric, num_bytes: float = LARGE) -> nx.Graph:
    """Build the graph, with nodes ("device", d), ("nvlink", n), ("nic", d), ("leaf", rail, i), ("spine", rail, i) and
    ("core", rail).

    Each edge has a `bandwidth` in byte/s, for messages of `num_bytes`, and a `latency_s`; latencies of a path add up.
    Raises ValueError for more than `MOST_DEVICES`.
    """
    if fabric.num_devices > MOST_DEVICES:
        raise ValueError(f"a graph of {fabric.num_devices:,} devices is too large: at most {MOST_DEVICES:,} are drawn")
    graph: nx.Graph = nx.Graph()
    multi_node = fabric.num_nodes > 1
    for device in range(fabric.num_devices):
        node, rail, kind = fabric.place(device)
        leaf, pod, links = node // LEAF, node // POD, kind.links
        nvlink, nic = (links.rate("message", level, num_bytes) for level in ("nvlink", "leaf"))
        leaf_s, spine_s, core_s = (links.latency_of(level) for level in ("leaf", "spine", "core"))
        _join(graph, ("device", device), ("nvlink", node), LinkRate(nvlink, links.latency_of("nvlink") / 2))
        if not multi_node:
            continue
        _join(graph, ("device", device), ("nic", device), LinkRate(nic, 0.0))
        _join(graph, ("nic", device), ("leaf", rail, leaf), LinkRate(nic, leaf_s / 2))
        if fabric.num_nodes > LEAF:
            _join(graph, ("leaf", rail, leaf), ("spine", rail, pod), LinkRate(nic * LEAF, (spine_s - leaf_s) / 2))
        if fabric.num_nodes > POD:
            _join(graph, ("spine", rail, pod), ("core", rail), LinkRate(nic * POD, (core_s - spine_s) / 2))
    return graph


def _join(graph: nx.Graph, a: tuple[object, ...], b: tuple[object, ...], link: LinkRate) -> None:
    """Join two nodes of the graph. A trunk to nodes of several kinds has the bandwidth of the widest."""
    bandwidth = max(link.bandwidth, graph.edges[a, b]["bandwidth"]) if graph.has_edge(a, b) else link.bandwidth
    graph.add_edge(a, b, bandwidth=bandwidth, latency_s=link.latency_s)
