"""The placement of one layer: which device each expert is on.

It is never worse than the published greedy algorithm in either of its two forms, as both are among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

import numpy as np

from compiler.plan.experts.layout import (
    ExpertLayout,
    Floats,
    Ints,
    LoadBalance,
    PlacementError,
    align_placement,
    balance_of,
    device_loads,
    keeps_groups,
)
from compiler.plan.experts.pack import (
    CLOSE,
    STEP,
    WorkLeft,
    descend,
    global_,
    hierarchical,
    kick_and_descend,
    lower_bound,
    pack,
    pack_bins,
    quick,
)

# --- Devices onto nodes, and groups of experts onto nodes, so that the loads of nodes and of their devices are even

# ---------------------------------------------------------------- devices onto nodes
MAX_CELLS = 1 << 20  # exchanges of experts that one step considers


def onto_nodes(share: Floats, devices: Ints, layout: ExpertLayout, work: WorkLeft) -> Ints:
    """Reorder the rows of `devices` [device, place] so that nodes are even. `share`: tokens of each item."""
    if layout.nodes == 1:
        return devices
    loads = share[devices].sum(axis=1)
    if layout.nodes == layout.devices:
        return devices
    order = pack(loads, layout.nodes, float(loads.sum()) / layout.nodes, work).bins.reshape(-1)
    return devices[order]


def even_nodes(share: Floats, devices: Ints, layout: ExpertLayout, work: WorkLeft) -> Ints:
    """Exchange items between the heaviest node and others while it gets lighter.

    No device gets heavier than the heaviest one is now.
    """
    if layout.nodes in (1, layout.devices):
        return devices
    devices = devices.copy()
    per_node = layout.devices // layout.nodes
    limit = float(share[devices].sum(axis=1).max()) * (1 + STEP)
    items = per_node * layout.slots
    partners = max(1, MAX_CELLS // items**2)
    while work.exchanges > 0:
        device = share[devices].sum(axis=1)
        node = device.reshape(layout.nodes, per_node).sum(axis=1)
        heaviest = int(node.argmax())
        if node[heaviest] <= node.mean() * (1 + CLOSE):
            break
        order = np.argsort(node, kind="stable")
        lighter_nodes = order[order != heaviest][:partners]
        heavy = heaviest * per_node + np.arange(per_node)
        light = (lighter_nodes[:, None] * per_node + np.arange(per_node)).reshape(-1)
        mine, theirs = devices[heavy].reshape(-1), devices[light].reshape(-1)
        work.spend(mine.size * theirs.size)
        moved = share[mine][:, None] - share[theirs][None, :]
        from_device, to_device = np.repeat(device[heavy], layout.slots), np.repeat(device[light], layout.slots)
        after = np.maximum(node[heaviest] - moved, np.repeat(node[lighter_nodes], items) + moved)
        heavier = np.maximum(from_device[:, None] - moved, to_device[None, :] + moved)
        after[heavier > limit] = np.inf
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= node[heaviest] * (1 - STEP):
            break
        a, b = (heavy[i // layout.slots], i % layout.slots), (light[j // layout.slots], j % layout.slots)
        devices[a], devices[b] = devices[b], devices[a]
    return devices


# ---------------------------------------------------------------- groups onto nodes
Groups = tuple[int, ...]  # the groups of a node, ascending
MAX_DIVISIONS = 120  # to share out groups; up to this many, all are considered
MAX_PLACED = 256  # experts over all ways that are placed, so small layers try more ways
# (load, layout, work) → placement of one node's experts, numbered from 0.
PlaceNode = Callable[[Floats, ExpertLayout, int], Ints]


def place_on_nodes(load: Floats, layout: ExpertLayout, place: PlaceNode, work: int) -> tuple[Ints, float]:
    """The best placement found with every group on one node and equally many groups on each.

    Also returns a lower bound of the busiest device of such placements, in tokens. Each node is placed like a layer.
    """
    inner = ExpertLayout(layout.experts // layout.nodes, 1, 1, layout.devices // layout.nodes)
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
    divisions = sorted(
        (max(map(bound, division)), index, division) for index, division in enumerate(_divisions(load, layout, work))
    )
    for number, (least, _, division) in enumerate(divisions):
        if best is not None and (least >= best[0] * (1 - CLOSE) or number * layout.experts >= MAX_PLACED * 2):
            break
        nodes = [solve(groups) for groups in division]
        candidate = max(heaviest for heaviest, _ in nodes), np.concatenate([physical for _, physical in nodes])
        if best is None or candidate[0] < best[0]:
            best = candidate
    assert best is not None
    all_divisions = len(divisions) == _num_divisions(layout)
    return best[1], divisions[0][0] if all_divisions else lower_bound(load, layout, grouped=True)


def _divisions(load: Floats, layout: ExpertLayout, work: int) -> list[tuple[Groups, ...]]:
    """All even divisions of the groups; if there are too many, the one of most even load, and the greedy one."""
    if _num_divisions(layout) <= MAX_DIVISIONS:
        return list(_all_divisions(tuple(range(layout.groups)), layout.groups // layout.nodes))
    group = load.reshape(layout.groups, -1).sum(axis=1)
    even_bins = pack(group, layout.nodes, float(group.sum()) / layout.nodes, WorkLeft(work // 4)).bins
    return list(
        dict.fromkeys(
            tuple(sorted(map(tuple, np.sort(bins, axis=1).tolist())))
            for bins in (even_bins, pack_bins(group, layout.nodes))
        )
    )


def _num_divisions(layout: ExpertLayout) -> int:
    """The number of divisions of the groups, or MAX_DIVISIONS + 1 if there are more than MAX_DIVISIONS."""
    per_node = layout.groups // layout.nodes
    count, remaining = 1, layout.groups
    while remaining and count <= MAX_DIVISIONS:
        count *= comb(remaining - 1, per_node - 1)
        remaining -= per_node
    return min(count, MAX_DIVISIONS + 1)


def _all_divisions(groups: Groups, size: int) -> Iterator[tuple[Groups, ...]]:
    """All divisions of groups into sets of `size`, where the order of sets does not matter."""
    if not groups:
        yield ()
        return
    first, *rest = groups
    for companions in combinations(rest, size - 1):
        for other_sets in _all_divisions(tuple(g for g in rest if g not in companions), size):
            yield ((first, *companions), *other_sets)


# --- layer search

GroupRule = Literal["auto", "keep", "ignore"]
# The approximate number of exchanges that a layer's search considers. Measured on one core: see docs/placement.md.
WORK = 3_000_000
KEEP_TOLERANCE = 1.01  # how much busier the busiest device may get to keep groups on their nodes
NEAR_TOLERANCE = 1.002  # the same to change less of the current placement


@dataclass(frozen=True)
class FoundPlacement:
    """A placement of a layer, with its balance and a lower bound."""

    physical: Ints  # slot → logical expert
    balance: LoadBalance
    bound: float  # of the busiest device's load over the mean
    keeps_groups: bool  # whether every group is on one node
    greedy: LoadBalance  # balance of the published algorithm
    grouped: Ints | None = None  # the best placement that keeps groups on their nodes, if it is another one

    @property
    def gap(self) -> float:
        """How far the busiest device is above the bound, as a share; 0 if no placement is better."""
        return max(0.0, self.balance.device / self.bound - 1)


def place_layer(
    load: Floats, layout: ExpertLayout, rule: GroupRule = "auto", current: Ints | None = None, steady: bool = False
) -> FoundPlacement:
    """The best placement found, by the busiest device and then by the busiest node.

    `rule`: `keep` puts each group on one node, and `ignore` puts experts anywhere. `auto` keeps groups on one node if
    that costs at most 1% and is not worse than the greedy algorithm. `current`: the placement before. Devices are named
    so that few experts move. With `steady`, only a few exchanges are made, at a cost of at most 0.2%. Raises
    PlacementError if the sizes do not fit.
    """
    layout.check()
    if rule == "keep" and not layout.groups_divide:
        raise PlacementError(
            f"groups = {layout.groups} do not divide over nodes = {layout.nodes}, so groups cannot stay on one node",
            "--group-rule ignore",
        )
    published = [global_(load, layout)]
    if layout.groups_divide:
        published.insert(0, hierarchical(load, layout))
    best_published = min((balance_of(load, physical, layout) for physical in published), key=_order)
    bound = _over_mean(lower_bound(load, layout), load, layout)
    grouped = free = None
    if layout.groups_divide and rule != "ignore":
        placement, least = place_on_nodes(load, layout, _free, WORK // 2)
        grouped = _best(load, layout, [placement, published[0]])
    if rule == "keep":
        bound = max(bound, _over_mean(least, load, layout))
        best_published = balance_of(load, published[0], layout)
    elif grouped is None or not _reaches_bound(load, layout, grouped, bound, best_published):
        free = _best(load, layout, [_free(load, layout, WORK), *published])
    chosen = grouped if free is None else free
    assert chosen is not None
    if grouped is not None and free is not None:
        chosen = _preferred_placement(load, layout, free, grouped, best_published, KEEP_TOLERANCE)
    if current is not None and steady:
        enough = balance_of(load, chosen, layout).device * NEAR_TOLERANCE * load.sum() / layout.devices
        for near in _near(load, layout, current, float(enough) * (1 - CLOSE), keep=chosen is grouped):
            chosen = _preferred_placement(load, layout, chosen, near, best_published, NEAR_TOLERANCE)
    if current is not None:
        chosen = align_placement(chosen, current, layout)
    whole_groups = keeps_groups(chosen, layout)
    reached, greedy = balance_of(load, chosen, layout), balance_of(load, published[0], layout)
    return FoundPlacement(chosen, reached, bound, whole_groups, greedy, None if whole_groups else grouped)


def _order(balance: LoadBalance) -> tuple[float, float]:
    return round(balance.device, 12), round(balance.node, 12)


def _best(load: Floats, layout: ExpertLayout, candidates: Sequence[Ints]) -> Ints:
    """The best of some placements, and the first of equals."""
    return min(candidates, key=lambda physical: _order(balance_of(load, physical, layout)))


def _reaches_bound(load: Floats, layout: ExpertLayout, grouped: Ints, bound: float, published: LoadBalance) -> bool:
    """Whether a placement with groups on their nodes reaches the bound, so that no other one can be better."""
    balance = balance_of(load, grouped, layout)
    return balance.device <= bound * (1 + CLOSE) and _order(balance) <= _order(published)


def _preferred_placement(
    load: Floats, layout: ExpertLayout, first: Ints, candidate: Ints, published: LoadBalance, tolerance: float
) -> Ints:
    """`candidate` if it is hardly worse than `first`, and better than the greedy algorithm if `first` is."""
    reached, ours = balance_of(load, first, layout), balance_of(load, candidate, layout)
    improves = ours.device < published.device * (1 - STEP) or reached.device >= published.device * (1 - STEP)
    is_close = ours.device <= reached.device * tolerance and _order(ours) <= _order(published)
    return candidate if is_close and improves else first


def _over_mean(tokens: float, load: Floats, layout: ExpertLayout) -> float:
    total = float(load.sum())
    return max(1.0, tokens * layout.devices / total) if total else 1.0


# ---------------------------------------------------------------- ways to a placement
def _free(load: Floats, layout: ExpertLayout, budget: int) -> Ints:
    """A placement that ignores groups."""
    bound = lower_bound(load, layout)
    packing = quick(load, layout.devices, bound, WorkLeft(budget // 2))
    bins = kick_and_descend(load, packing, bound, WorkLeft(budget // 2)).bins
    bins = onto_nodes(load, bins, layout, WorkLeft(budget // 4))
    return even_nodes(load, bins, layout, WorkLeft(budget // 4)).reshape(-1)


def _near(load: Floats, layout: ExpertLayout, current: Ints, enough: float, keep: bool) -> Iterator[Ints]:
    """Yield the current placement after exchanges, made until no device has more than `enough`, then without them."""
    if keep and not keeps_groups(current, layout):
        return
    share, bins = load[current], np.arange(layout.experts, dtype=np.int64).reshape(layout.devices, -1)
    if keep:
        parts = bins.reshape(layout.nodes, -1, layout.slots)
        bins = np.concatenate([descend(share, part, enough, WorkLeft(WORK // 8)).bins for part in parts])
    else:
        bins = even_nodes(share, descend(share, bins, enough, WorkLeft(WORK // 8)).bins, layout, WorkLeft(WORK // 8))
    yield current[bins].reshape(-1)
    yield current
