"""How expert groups lie on the nodes of a cluster, and how many of these the experts of a token reach.

World ranks are laid on devices in their order, so an expert group is a run of devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache


def group_nodes(devices: int, expert: int) -> int | None:
    """Nodes of so many devices that each expert group lies on: one, or several that it fills. None where groups begin
    or end inside of a node that they do not lie in whole."""
    if devices % expert == 0:
        return 1
    return expert // devices if expert % devices == 0 else None


def most_group_nodes(sizes: Iterable[int], expert: int) -> int | None:
    """`group_nodes` of the nodes on which a group lies on most, of nodes of several sizes; None where any has none."""
    found = [group_nodes(devices, expert) for devices in sizes]
    return None if None in found else max(each for each in found if each is not None)


def groups_fall(groups: int, nodes: int) -> bool:
    """Whether each of the nodes has whole groups of experts, or each group has whole nodes."""
    return groups % nodes == 0 or nodes % groups == 0


@cache
def reached(groups: int, top_groups: int, nodes: int) -> int:
    """The most nodes that the experts of a token lie on, if they are in `top_groups` of `groups` equal groups, and the
    experts lie on the nodes by their number."""
    touched = sorted(-(-(g + 1) * nodes // groups) - g * nodes // groups for g in range(groups))
    return min(nodes, sum(touched[-top_groups:]))
