"""The cluster as a graph that prices transfers: in closed form for any size, and as a networkx graph for small ones."""

from compiler.machine.topology.fabric import LEVELS, ExpertTraffic, Fabric, LinkRate, NodeLinks, NodeRun

__all__ = ["LEVELS", "ExpertTraffic", "Fabric", "LinkRate", "NodeLinks", "NodeRun"]
