"""What a placement sends over the links: copies of a token to nodes and to devices.

A token goes to each node once, from there to each device once, as DeepSeek-V3 dispatches it (arXiv 2412.19437, §3.2.2).
How often two experts are chosen together is not in a load, so it is assumed that a token takes a group as often as the
group's load says, and that within its groups its experts do not depend on each other; groups neither. What holds
without the assumption is given beside it: `least` where experts of a node are chosen together as often as can be,
`most` where as seldom.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from compiler.plan.experts.layout import Floats, Ints, Layout, keeps_groups


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token chooses: `top_k` experts of `top_groups` groups; and what a copy of it weighs."""

    top_k: int
    top_groups: int
    row_bytes: int  # there and back


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a token, on average: expected, and what no choice of experts with this load goes below or above.

    busiest: share of tokens that the busiest node or device gets a copy of.
    """

    expected: float
    least: float
    most: float
    busiest: float

    def over_links(self, nodes: int) -> float:
        """Expected copies that leave the token's node: tokens begin on every node alike."""
        return self.expected * (nodes - 1) / nodes


def copies(load: Floats, physical: Ints, layout: Layout, routing: Routing, parts: int) -> Copies:
    """To the nodes (`parts` = nodes) or to the devices of a placement; zeros without load."""
    total = float(load.sum())
    if total == 0:
        return Copies(0.0, 0.0, 0.0, 0.0)
    chosen = np.minimum(1.0, load / total * routing.top_k)  # how often a token takes each expert
    used = _used(chosen, layout, routing)
    counts = np.bincount(physical, minlength=layout.experts)
    held = np.zeros((parts, layout.experts))
    np.add.at(held, (np.arange(layout.replicas) // (layout.replicas // parts), physical), 1.0)
    here = held / counts * chosen  # [part, expert] → how often a token takes it there
    size = layout.experts // layout.groups
    of_group = np.repeat(used, size)
    within = np.divide(here, of_group, out=np.zeros_like(here), where=of_group > 0)
    missed = 1.0 - used * (1.0 - (1.0 - within).reshape(parts, layout.groups, size).prod(axis=2))
    reached = 1.0 - missed.prod(axis=1)
    least, most = float(here.max(axis=1).sum()), float(np.minimum(1.0, here.sum(axis=1)).sum())
    whole = parts == layout.nodes and keeps_groups(physical, layout)  # then a token has no more nodes than groups
    most = min(most, routing.top_k, *([routing.top_groups] if whole else []))
    return Copies(min(float(reached.sum()), most), least, most, float(reached.max()))


def _used(chosen: Floats, layout: Layout, routing: Routing) -> Floats:
    """How often a token takes each group: in proportion to its load, `top_groups` in all, no group more than always."""
    group = chosen.reshape(layout.groups, -1)
    used = np.minimum(1.0, group.sum(axis=1) * routing.top_groups / routing.top_k)
    result: Floats = np.maximum(used, group.max(axis=1))
    return result
