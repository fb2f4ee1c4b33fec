"""Devices onto nodes, and groups of experts onto nodes, so that nodes and their devices are even."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb

import numpy as np

from compiler.plan.experts.greedy import lower_bound, packed
from compiler.plan.experts.layout import Floats, Ints, Layout, device_loads
from compiler.plan.experts.pack import CLOSE, STEP, Work, pack

# ---------------------------------------------------------------- devices onto nodes

MAX_CELLS = 1 << 20  # exchanges of experts looked at in one step


def onto_nodes(share: Floats, devices: Ints, layout: Layout, work: Work) -> Ints:
    """The devices [device, place] in the order of their nodes. `share`: tokens of each item that is placed."""
    if layout.nodes == 1:
        return devices
    loads = share[devices].sum(axis=1)
    if layout.nodes == layout.devices:
        return devices
    order = pack(loads, layout.nodes, float(loads.sum()) / layout.nodes, work).bins.reshape(-1)
    return devices[order]


def even_nodes(share: Floats, devices: Ints, layout: Layout, work: Work) -> Ints:
    """Exchange items between devices of the heaviest node and others, as long as it gets lighter and no device gets
    heavier than the heaviest is."""
    if layout.nodes in (1, layout.devices):
        return devices
    devices = devices.copy()
    per_node = layout.devices // layout.nodes
    limit = float(share[devices].sum(axis=1).max()) * (1 + STEP)
    items = per_node * layout.slots
    partners = max(1, MAX_CELLS // items**2)
    while work.left > 0:
        device = share[devices].sum(axis=1)
        node = device.reshape(layout.nodes, per_node).sum(axis=1)
        heaviest = int(node.argmax())
        if node[heaviest] <= node.mean() * (1 + CLOSE):
            break
        order = np.argsort(node, kind="stable")
        others = order[order != heaviest][:partners]
        here = heaviest * per_node + np.arange(per_node)
        there = (others[:, None] * per_node + np.arange(per_node)).reshape(-1)
        given, taken = devices[here].reshape(-1), devices[there].reshape(-1)
        work.spend(given.size * taken.size)
        moved = share[given][:, None] - share[taken][None, :]
        from_device, to_device = np.repeat(device[here], layout.slots), np.repeat(device[there], layout.slots)
        after = np.maximum(node[heaviest] - moved, np.repeat(node[others], items) + moved)
        heavier = np.maximum(from_device[:, None] - moved, to_device[None, :] + moved)
        after[heavier > limit] = np.inf
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= node[heaviest] * (1 - STEP):
            break
        a, b = (here[i // layout.slots], i % layout.slots), (there[j // layout.slots], j % layout.slots)
        devices[a], devices[b] = devices[b], devices[a]
    return devices


def apart(expert: Ints, share: Floats, devices: Ints, layout: Layout) -> Ints:
    """Replicas of an expert that share a device are exchanged away where no device and no node gets heavier than the
    heaviest is. `expert`: the logical expert of each item."""
    devices = devices.copy()
    per_node = layout.devices // layout.nodes
    device = share[devices].sum(axis=1)
    node = device.reshape(layout.nodes, per_node).sum(axis=1)
    limit, node_limit = device.max() * (1 + STEP), node.max() * (1 + STEP)
    for d, place in _repeated(expert[devices]):
        item = int(devices[d, place])
        moved = share[item] - share[devices]  # what device d loses, whichever it gets for it
        other = np.arange(layout.devices)
        same = (other // per_node == d // per_node)[:, None]
        fits = (device[d] - moved <= limit) & (device[:, None] + moved <= limit)
        change = np.where(same, 0.0, moved)
        fits &= (node[d // per_node] - change <= node_limit) & (node[other // per_node][:, None] + change <= node_limit)
        fits &= ~(expert[devices] == expert[item]).any(axis=1)[:, None]  # there is none of it there
        fits &= ~np.isin(expert[devices], expert[devices[d]])  # nor of what comes here
        if not fits.any():
            continue
        b, j = np.unravel_index(int(fits.argmax()), fits.shape)
        by = float(moved[b, j])
        devices[d, place], devices[b, j] = devices[b, j], item
        device[d] -= by
        device[b] += by
        if b // per_node != d // per_node:
            node[d // per_node] -= by
            node[b // per_node] += by
    return devices


def _repeated(experts: Ints) -> list[tuple[int, int]]:
    """(device, place) of every second and further replica of an expert on its device."""
    found = []
    for d, row in enumerate(experts.tolist()):
        seen: set[int] = set()
        for place, expert in enumerate(row):
            if expert in seen:
                found.append((d, place))
            seen.add(expert)
    return found


# ---------------------------------------------------------------- groups onto nodes

Groups = tuple[int, ...]  # of a node, ascending
MAX_WAYS = 120  # to share out groups, of which all are looked at
MAX_PLACED = 256  # replicas, over all ways whose experts are placed: more for small layers

# The placement of one node's experts (numbered from 0), for an amount of work.
PlaceNode = Callable[[Floats, Layout, int], Ints]


def on_nodes(load: Floats, layout: Layout, place: PlaceNode, work: int) -> tuple[Ints, float]:
    """The best placement found that keeps every group on one node, equally many on each; and what the busiest device of
    none that does so goes below, in tokens. Each node is a layer of its own."""
    inner = Layout(
        layout.experts // layout.nodes, layout.replicas // layout.nodes, 1, 1, layout.devices // layout.nodes
    )
    size = layout.experts // layout.groups
    bounds: dict[Groups, float] = {}
    reached: dict[Groups, tuple[float, Ints]] = {}

    def experts_of(groups: Groups) -> Ints:
        return np.concatenate([np.arange(g * size, (g + 1) * size) for g in groups])

    def bound(groups: Groups) -> float:
        if groups not in bounds:
            bounds[groups] = lower_bound(load[experts_of(groups)], inner)
        return bounds[groups]

    def solve(groups: Groups) -> tuple[float, Ints]:
        if groups not in reached:
            experts = experts_of(groups)
            physical = place(load[experts], inner, work // layout.nodes)
            heaviest = float(device_loads(load[experts], physical, inner.devices).max())
            reached[groups] = heaviest, experts[physical]
        return reached[groups]

    best: tuple[float, Ints] | None = None
    ways = sorted((max(map(bound, way)), index, way) for index, way in enumerate(_ways(load, layout, work)))
    for number, (least, _, way) in enumerate(ways):
        if best is not None and (least >= best[0] * (1 - CLOSE) or number * layout.replicas >= MAX_PLACED * 2):
            break
        nodes = [solve(groups) for groups in way]
        found = max(heaviest for heaviest, _ in nodes), np.concatenate([physical for _, physical in nodes])
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    everything = len(ways) == _num_ways(layout)
    return best[1], ways[0][0] if everything else lower_bound(load, layout, grouped=True)


def _ways(load: Floats, layout: Layout, work: int) -> list[tuple[Groups, ...]]:
    """All ways to share out the groups evenly; if they are too many, the evenest of load, and the greedy's."""
    if _num_ways(layout) <= MAX_WAYS:
        return list(_all(tuple(range(layout.groups)), layout.groups // layout.nodes))
    group = load.reshape(layout.groups, -1).sum(axis=1)
    even = pack(group, layout.nodes, float(group.sum()) / layout.nodes, Work(work // 4)).bins
    return list(
        dict.fromkeys(
            tuple(sorted(map(tuple, np.sort(bins, axis=1).tolist()))) for bins in (even, packed(group, layout.nodes))
        )
    )


def _num_ways(layout: Layout) -> int:
    """Ways to share out the groups; MAX_WAYS + 1 if there are more."""
    each = layout.groups // layout.nodes
    count, left = 1, layout.groups
    while left and count <= MAX_WAYS:
        count *= comb(left - 1, each - 1)
        left -= each
    return min(count, MAX_WAYS + 1)


def _all(groups: Groups, each: int) -> Iterator[tuple[Groups, ...]]:
    """Ways to share out groups in sets of `each`, without regard to the order of sets."""
    if not groups:
        yield ()
        return
    first, *rest = groups
    for others in combinations(rest, each - 1):
        for ways in _all(tuple(g for g in rest if g not in others), each):
            yield ((first, *others), *ways)
