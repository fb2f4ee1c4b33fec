"""The cluster as a graph that prices transfers: in closed form for any size, as networkx for small ones."""

from compiler.machine.topology.fabric import LEVELS, Experts, Fabric, Link, Links, Nodes

__all__ = ["LEVELS", "Experts", "Fabric", "Link", "Links", "Nodes"]
