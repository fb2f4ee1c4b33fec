"""Pack items into equally full bins so that the heaviest bin is light: bin packing with a cardinality, so NP-hard.

There are two starts: longest first, and largest differencing, whose bins differ least. Exchanges of one or two items
between the heaviest bin and all others follow, and then seeded kicks out of local optima. Work is counted, not timed,
so that the result is the same everywhere.

Sources: Graham, "Bounds on multiprocessing timing anomalies", 1969; Karmarkar and Karp, "The differencing method of set
partitioning", 1982; Michiels et al., "Performance ratios for the differencing method applied to the balanced number
partitioning problem", 2003.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from compiler.plan.experts.layout import ExpertLayout, Floats, Ints

# --- The published greedy algorithm: hierarchical if groups divide over the nodes, else global
#
# Source: DeepSeek-AI, "Expert Parallelism Load Balancer", 2025, with one replica per expert, as in training. (1) Groups
# go to nodes: by descending load, each to the lightest node with a free place. (2) The experts of a node go to its
# devices in the same way. The global form has one group and one node.
#
# The lower bound of any placement, in tokens of the busiest device, is here too. It comes from averages and from the
# pigeonhole principle.


def hierarchical(load: Floats, layout: ExpertLayout) -> Ints:
    """The logical expert of each slot, with every group on one node. Groups must divide over the nodes."""
    assert layout.groups_divide, layout
    size = layout.experts // layout.groups
    nodes = pack_bins(load.reshape(layout.groups, size).sum(axis=1), layout.nodes)
    experts = (nodes[:, :, None] * size + np.arange(size)).reshape(layout.nodes, -1)
    return np.concatenate([_of_node(load, row, layout) for row in experts])


def global_(load: Floats, layout: ExpertLayout) -> Ints:
    """The logical expert of each slot, without regard to groups and nodes."""
    return hierarchical(load, ExpertLayout(layout.experts, 1, 1, layout.devices))


def greedy(load: Floats, layout: ExpertLayout) -> Ints:
    """The placement by the published algorithm for this layout."""
    return hierarchical(load, layout) if layout.groups_divide else global_(load, layout)


def _of_node(load: Floats, experts: Ints, layout: ExpertLayout) -> Ints:
    """The slots of a node that has these experts."""
    physical: Ints = experts[pack_bins(load[experts], layout.devices // layout.nodes)]
    return physical.reshape(-1)


def pack_bins(weights: Floats, num_bins: int) -> Ints:
    """[bin, place] → item: by descending weight, each into the lightest bin with a free place. All end equally full."""
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
MAX_DEPTH = 64  # the most experts on one device that the pigeonhole bound considers


def lower_bound(load: Floats, layout: ExpertLayout, grouped: bool = False) -> float:
    """A lower bound of the busiest device's tokens. `grouped`: for placements with every group on one node."""
    bounds = [float(load.sum()) / layout.devices, float(load.max()), _sharing(load, layout)]
    if grouped:
        bounds.append(_groups(load, layout))
    return max(bounds)


def _sharing(load: Floats, layout: ExpertLayout) -> float:
    """A lower bound: j + 1 of the j·devices + 1 heaviest experts share a device, with the lightest experts at best."""
    places, loads = layout.slots, np.sort(load)[::-1]
    light = np.concatenate([[0.0], np.cumsum(loads[::-1])])
    best = 0.0
    for j in range(min(places, MAX_DEPTH)):
        if j * layout.devices >= len(loads):
            break
        heavy = loads[max(0, j * layout.devices - j) : j * layout.devices + 1].sum()  # the j + 1 lightest of those
        best = max(best, float(heavy + light[places - j - 1]))
    return best


def _groups(load: Floats, layout: ExpertLayout) -> float:
    """A lower bound: j + 1 of the j·nodes + 1 heaviest groups share a node, with the lightest groups at best."""
    group = np.sort(load.reshape(layout.groups, -1).sum(axis=1))[::-1]
    per_node = layout.groups // layout.nodes
    light = np.concatenate([[0.0], np.cumsum(group[::-1])])
    node = max(
        float(group[j * layout.nodes - j : j * layout.nodes + 1].sum() + light[per_node - j - 1])
        for j in range(min(per_node, MAX_DEPTH))
    )
    return node * layout.nodes / layout.devices


# --- pack

CLOSE = 1e-5  # a result this close to its bound, relatively, is not improved any further
STEP = 1e-12  # the least relative gain of an exchange, so that rounding cannot cause cycles
MAX_EXCHANGES = 1 << 18  # that one step considers
SHUFFLED = 3  # bins that a kick shuffles
OVERHEAD = 2_000  # cost of a step, in exchanges


@dataclass
class WorkLeft:
    """The number of exchanges that may still be considered."""

    exchanges: int

    def spend(self, count: int) -> None:
        self.exchanges -= count + OVERHEAD


@dataclass(frozen=True)
class Packing:
    """Items in equally full bins."""

    bins: Ints  # [bin, place] → item
    heaviest: float  # weight of the heaviest bin


def pack(weights: Floats, num_bins: int, target: float, work: WorkLeft) -> Packing:
    """The best packing found. The search ends early if no bin is above `target`."""
    return kick_and_descend(weights, quick(weights, num_bins, target, work), target, work)


def quick(weights: Floats, num_bins: int, target: float, work: WorkLeft) -> Packing:
    """The best packing found without kicks."""
    places = len(weights) // num_bins
    if places == 1 or num_bins == 1:
        return _packing(weights, np.arange(len(weights), dtype=np.int64).reshape(num_bins, places))
    best: Packing | None = None
    for start in (pack_bins, largest_differencing):
        packing = descend(weights, start(weights, num_bins), target, work)
        if best is None or packing.heaviest < best.heaviest * (1 - STEP):
            best = packing
        if best.heaviest <= target * (1 + CLOSE):
            break
    assert best is not None
    return best


def _packing(weights: Floats, bins: Ints) -> Packing:
    return Packing(bins, float(weights[bins].sum(axis=1).max()))


def largest_differencing(weights: Floats, num_bins: int) -> Ints:
    """Balanced largest differencing: combine the partial packings that differ most, heaviest bin with lightest."""
    items = np.argsort(-weights, kind="stable").reshape(-1, num_bins)  # rows of similar weights, an item for each bin
    parts = [(row[:, None], weights[row]) for row in items]
    heap = [(float(sums.min() - sums.max()), index) for index, (_, sums) in enumerate(parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        (members_a, sums_a), (members_b, sums_b) = parts[a], parts[b]
        descending, ascending = np.argsort(-sums_a, kind="stable"), np.argsort(sums_b, kind="stable")
        sums = sums_a[descending] + sums_b[ascending]
        parts.append((np.concatenate([members_a[descending], members_b[ascending]], axis=1), sums))
        heapq.heappush(heap, (float(sums.min() - sums.max()), len(parts) - 1))
    bins: Ints = parts[-1][0].astype(np.int64)
    return bins


def descend(weights: Floats, bins: Ints, target: float, work: WorkLeft) -> Packing:
    """Exchange items while the heaviest bin and its partner both end lighter than the heaviest bin was."""
    bins = bins.copy()
    pairs = np.triu_indices(bins.shape[1], k=1)
    while work.exchanges > 0 and len(bins) > 1:
        sums = weights[bins].sum(axis=1)
        heaviest = int(sums.argmax())
        if sums[heaviest] <= target * (1 + CLOSE):
            break
        if not _exchange_one(weights, bins, sums, heaviest, work) and not _exchange_two(
            weights, bins, sums, heaviest, pairs, work
        ):
            break
    return _packing(weights, bins)


def kick_and_descend(weights: Floats, best: Packing, target: float, work: WorkLeft) -> Packing:
    """Shuffle the heaviest bin with a few others and descend again. Keeps a result that is not heavier."""
    random = np.random.default_rng(len(weights))
    num_bins, places = best.bins.shape
    while work.exchanges > 0 and best.heaviest > target * (1 + CLOSE) and min(num_bins, places) > 1:
        work.spend(0)
        bins = best.bins.copy()
        chosen = random.permutation(num_bins)[: SHUFFLED - 1]
        chosen = np.unique(np.append(chosen, weights[bins].sum(axis=1).argmax()))
        bins[chosen] = random.permutation(bins[chosen].reshape(-1)).reshape(len(chosen), places)
        packing = descend(weights, bins, target, work)
        if packing.heaviest <= best.heaviest:
            best = packing
    return best


def _exchange_one(weights: Floats, bins: Ints, sums: Floats, heaviest: int, work: WorkLeft) -> bool:
    """Make the best exchange of one item of the heaviest bin; returns whether one helps."""
    partners = _partners(sums, heaviest, bins.shape[1] ** 2)
    mine, theirs = weights[bins[heaviest]], weights[bins[partners]]
    exchange = _best(mine, theirs, sums[heaviest], sums[partners], work)
    if exchange is None:
        return False
    i, b, j = exchange
    partner = partners[b]
    bins[heaviest, i], bins[partner, j] = bins[partner, j], bins[heaviest, i]
    return True


def _exchange_two(
    weights: Floats, bins: Ints, sums: Floats, heaviest: int, pairs: tuple[Ints, Ints], work: WorkLeft
) -> bool:
    """Make the best exchange of two items of the heaviest bin. Bins of up to five items need no larger exchanges."""
    first, second = pairs
    if bins.shape[1] < 4 or len(first) ** 2 > MAX_EXCHANGES:
        return False
    partners = _partners(sums, heaviest, len(first) ** 2)
    values = weights[bins]
    my_pairs, their_pairs = (
        values[heaviest][first] + values[heaviest][second],
        values[partners][:, first] + values[partners][:, second],
    )
    exchange = _best(my_pairs, their_pairs, sums[heaviest], sums[partners], work)
    if exchange is None:
        return False
    i, b, j = exchange
    my_pair, their_pair = (first[i], second[i]), (first[j], second[j])
    partner = partners[b]
    for mine, theirs in zip(my_pair, their_pair, strict=True):
        bins[heaviest, mine], bins[partner, theirs] = bins[partner, theirs], bins[heaviest, mine]
    return True


def _partners(sums: Floats, heaviest: int, exchanges: int) -> Ints:
    """The bins to exchange with: all others, or as many of the lightest as one step considers."""
    order = np.argsort(sums, kind="stable")
    return order[order != heaviest][: max(1, MAX_EXCHANGES // exchanges)]


def _best(
    mine: Floats, theirs: Floats, heaviest: float, partner_sums: Floats, work: WorkLeft
) -> tuple[int, int, int] | None:
    """The exchange (item of `mine`, bin, item of `theirs`) that leaves the heavier of both bins lightest.

    `mine` are weights in the heaviest bin and `theirs` weights in the others. Returns None if no exchange helps.
    """
    work.spend(mine.size * theirs.size)
    moved = mine[:, None, None] - theirs[None, :, :]
    after = np.maximum(heaviest - moved, partner_sums[None, :, None] + moved)
    flat = int(after.argmin())
    if after.reshape(-1)[flat] >= heaviest * (1 - STEP):
        return None
    i, b, j = np.unravel_index(flat, after.shape)
    return int(i), int(b), int(j)
