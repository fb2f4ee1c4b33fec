"""Devices onto nodes, and experts between them, so that nodes are even too while no device gets heavier."""

from __future__ import annotations

import numpy as np

from compiler.experts.layout import Floats, Ints, Layout
from compiler.experts.pack import CLOSE, STEP, Work, pack

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
