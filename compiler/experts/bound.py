"""What no placement can go below: the load of the busiest device, in tokens. Every bound is one of averages or of
pigeonholes, and holds for all numbers of replicas that fill the slots.
"""

from __future__ import annotations

import numpy as np

from compiler.experts.greedy import replicate
from compiler.experts.layout import Floats, Layout

MAX_DEPTH = 64  # experts that share a device, of the pigeonhole bound


def lower_bound(load: Floats, layout: Layout, grouped: bool = False) -> float:
    """No placement has a busiest device below this; `grouped`: none that keeps every group on one node."""
    counts, _ = replicate(load, layout.replicas)
    bounds = [float(load.sum()) / layout.devices, float((load / counts).max()), _sharing(load, layout)]
    if grouped:
        bounds.append(_groups(load, layout))
    return max(bounds)


def _sharing(load: Floats, layout: Layout) -> float:
    """A lower bound: j + 1 of the j·devices + 1 heaviest experts share a device, beside the lightest experts.

    At most `replicas - experts` experts have a second replica; if these are the heaviest, the others are still whole.
    """
    spare, places = layout.replicas - layout.experts, layout.slots
    whole = np.sort(load)[::-1][spare:]
    light = np.concatenate([[0.0], np.cumsum(whole[::-1])]) if spare == 0 else np.zeros(places + 1)
    best = 0.0
    for j in range(min(places, MAX_DEPTH)):
        if j * layout.devices >= len(whole):
            break
        heavy = whole[max(0, j * layout.devices - j) : j * layout.devices + 1].sum()  # the j + 1 lightest of those
        best = max(best, float(heavy + light[places - j - 1]))
    return best


def _groups(load: Floats, layout: Layout) -> float:
    """A lower bound: j + 1 of the j·nodes + 1 heaviest groups share a node, and a group fits the slots of its node."""
    group = np.sort(load.reshape(layout.groups, -1).sum(axis=1))[::-1]
    per_node, size, slots = layout.groups // layout.nodes, layout.experts // layout.groups, layout.replicas
    # without spare slots every node has equally many groups, so that the rest of it are at least the lightest
    full = slots == layout.experts
    light = np.concatenate([[0.0], np.cumsum(group[::-1])]) if full else np.zeros(per_node + 1)
    node = max(
        float(group[j * layout.nodes - j : j * layout.nodes + 1].sum() + light[per_node - j - 1])
        for j in range(min(per_node, MAX_DEPTH))
    )
    parts = load.reshape(layout.groups, size)
    single = max(float((part / replicate(part, slots // layout.nodes)[0]).max()) for part in parts)
    return max(node * layout.nodes / layout.devices, single)
