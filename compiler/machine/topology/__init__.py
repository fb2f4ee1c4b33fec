"""The cluster as a graph that prices transfers: in closed form for any size, as networkx for small ones."""

from compiler.machine.topology.fabric import Experts, Fabric, Nodes
from compiler.machine.topology.links import LEVELS, Link, Links

__all__ = ["LEVELS", "Experts", "Fabric", "Link", "Links", "Nodes"]
