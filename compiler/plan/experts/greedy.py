"""The published greedy algorithm: hierarchical where groups divide over the nodes, else global.

Source: DeepSeek-AI, "Expert Parallelism Load Balancer", 2025. (1) groups onto nodes: by load descending, each into the
lightest node with a free place; (2) on each node replicate: one more replica for the expert with the highest load per
replica, until the slots are full; (3) replicas onto the node's devices as in (1). Global: one group, one node.

Beside it the bound that no placement goes below: the load of the busiest device, in tokens. Every bound is one of
averages or of pigeonholes, and holds for all numbers of replicas that fill the slots.
"""

from __future__ import annotations

import heapq

import numpy as np

from compiler.plan.experts.layout import Floats, Ints, Layout


def hierarchical(load: Floats, layout: Layout) -> Ints:
    """Logical expert of each slot, with every group on one node. The groups divide over the nodes."""
    assert layout.groups_divide, layout
    size = layout.experts // layout.groups
    nodes = packed(load.reshape(layout.groups, size).sum(axis=1), layout.nodes)
    experts = (nodes[:, :, None] * size + np.arange(size)).reshape(layout.nodes, -1)
    return np.concatenate([_of_node(load, row, layout) for row in experts])


def global_(load: Floats, layout: Layout) -> Ints:
    """Logical expert of each slot; groups and nodes do not count."""
    return hierarchical(load, Layout(layout.experts, layout.replicas, 1, 1, layout.devices))


def greedy(load: Floats, layout: Layout) -> Ints:
    """What the published algorithm does for this layout."""
    return hierarchical(load, layout) if layout.groups_divide else global_(load, layout)


def _of_node(load: Floats, experts: Ints, layout: Layout) -> Ints:
    """The slots of one node, which has these experts."""
    counts, order = replicate(load[experts], layout.replicas // layout.nodes)
    share = load[experts] / counts
    physical: Ints = experts[order[packed(share[order], layout.devices // layout.nodes)]]
    return physical.reshape(-1)


def replicate(load: Floats, slots: int) -> tuple[Ints, Ints]:
    """(replicas of each expert, expert of each replica in the order of making).

    Giving the next replica to the highest load per replica makes the highest in the end as low as any counts do: an
    expert gets its n-th replica only while its load / (n-1) is the highest, which every lower maximum must undo too.
    """
    counts = np.ones(len(load), dtype=np.int64)
    order = list(range(len(load)))
    heap = [(-value, index) for index, value in enumerate(load.tolist())]
    heapq.heapify(heap)
    values = load.tolist()
    for _ in range(slots - len(load)):
        _, index = heap[0]
        order.append(index)
        counts[index] += 1
        heapq.heapreplace(heap, (-values[index] / int(counts[index]), index))
    return counts, np.array(order, dtype=np.int64)


def packed(weights: Floats, num_bins: int) -> Ints:
    """[bin, place] → item: by weight descending, each into the lightest bin with a free place; all are equally full."""
    places = len(weights) // num_bins
    if places == 1:
        return np.arange(num_bins, dtype=np.int64).reshape(num_bins, 1)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, index) for index in range(num_bins)]
    values = weights.tolist()
    for item in np.argsort(-weights, kind="stable").tolist():
        total, index = heap[0]
        bins[index].append(item)
        if len(bins[index]) == places:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (total + values[item], index))
    return np.array(bins, dtype=np.int64)


# ---------------------------------------------------------------- the bound

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
