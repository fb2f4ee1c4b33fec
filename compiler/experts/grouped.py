"""Groups onto nodes: which of them share a node, so that the experts of each node can be packed evenly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb

import numpy as np

from compiler.experts.bound import lower_bound
from compiler.experts.greedy import packed
from compiler.experts.layout import Floats, Ints, Layout, device_loads
from compiler.experts.pack import CLOSE, Work, pack

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
    placed: dict[Groups, tuple[float, Ints]] = {}

    def experts_of(groups: Groups) -> Ints:
        return np.concatenate([np.arange(g * size, (g + 1) * size) for g in groups])

    def bound(groups: Groups) -> float:
        if groups not in bounds:
            bounds[groups] = lower_bound(load[experts_of(groups)], inner)
        return bounds[groups]

    def solve(groups: Groups) -> tuple[float, Ints]:
        if groups not in placed:
            experts = experts_of(groups)
            physical = place(load[experts], inner, work // layout.nodes)
            heaviest = float(device_loads(load[experts], physical, inner.devices).max())
            placed[groups] = heaviest, experts[physical]
        return placed[groups]

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
