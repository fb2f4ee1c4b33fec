"""The placement of one layer: how many replicas each expert has, and which devices they are on.

It is never worse than the published greedy algorithm, in either of its two forms: both are among what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compiler.experts.align import aligned
from compiler.experts.bound import lower_bound
from compiler.experts.counts import first_counts, moved_counts
from compiler.experts.greedy import global_, hierarchical
from compiler.experts.grouped import on_nodes
from compiler.experts.layout import Balance, Floats, Ints, Layout, PlaceError, balance_of, duplicates, keeps_groups
from compiler.experts.nodes import apart, even_nodes, onto_nodes
from compiler.experts.pack import CLOSE, STEP, Packing, Work, descended, kicked, quick

GroupRule = Literal["auto", "keep", "ignore"]
# Exchanges that a layer looks at, about. Measured on one core: see docs/placement.md.
WORK = 3_000_000
KEEP_TOLERANCE = 1.01  # of the busiest device, what keeping groups on their nodes may cost
NEAR_TOLERANCE = 1.002  # the same of changing less of the placement at hand


@dataclass(frozen=True)
class Placed:
    """A placement of a layer, what it reaches, and what none can go below (as a balance: over the mean)."""

    physical: Ints  # slot → logical expert
    balance: Balance
    bound: float
    kept: bool  # every group on one node
    greedy: Balance  # of the published algorithm
    whole: Ints | None = None  # the best that keeps groups on their nodes, where that is another

    @property
    def gap(self) -> float:
        """How far the busiest device is above the bound; 0 where it is the best there is."""
        return max(0.0, self.balance.device / self.bound - 1)


def place_layer(
    load: Floats, layout: Layout, rule: GroupRule = "auto", now: Ints | None = None, steady: bool = False
) -> Placed:
    """The best placement found: by the busiest device, then the busiest node, then replicas that share a device.

    `rule`: each group on one node (`keep`), experts anywhere (`ignore`), or (`auto`) groups on one node where that
    costs at most 1% and does not lose against the greedy algorithm. `now`: the placement at hand: devices are named so
    that little moves, and where it is `steady`, only some exchanges are made, at a cost of at most 0.2%. PlaceError
    where the sizes do not fit.
    """
    layout.check()
    if rule == "keep" and not layout.groups_divide:
        raise PlaceError(
            f"groups = {layout.groups} do not divide over nodes = {layout.nodes}, so that none can be kept on one",
            "--group-rule ignore",
        )
    known = [global_(load, layout)]
    if layout.groups_divide:
        known.insert(0, hierarchical(load, layout))
    best_known = min((balance_of(load, physical, layout) for physical in known), key=_order)
    bound = _over_mean(lower_bound(load, layout), load, layout)
    kept = free = None
    if layout.groups_divide and rule != "ignore":
        found, least = on_nodes(load, layout, _free, WORK // 2)
        kept = _best(load, layout, [found, known[0]])
    if rule == "keep":
        bound = max(bound, _over_mean(least, load, layout))
        best_known = balance_of(load, known[0], layout)
    elif kept is None or not _will_do(load, layout, kept, bound, best_known):
        free = _best(load, layout, [_free(load, layout, WORK), *known])
    chosen = kept if free is None else free
    assert chosen is not None
    if kept is not None and free is not None:
        chosen = _preferred(load, layout, free, kept, best_known, KEEP_TOLERANCE)
    if now is not None and steady:
        enough = balance_of(load, chosen, layout).device * NEAR_TOLERANCE * load.sum() / layout.devices
        for near in _near(load, layout, now, float(enough) * (1 - CLOSE), keep=chosen is kept):
            chosen = _preferred(load, layout, chosen, near, best_known, NEAR_TOLERANCE)
    if now is not None:
        chosen = aligned(chosen, now, layout)
    kept_groups = keeps_groups(chosen, layout)
    reached, greedy = balance_of(load, chosen, layout), balance_of(load, known[0], layout)
    return Placed(chosen, reached, bound, kept_groups, greedy, None if kept_groups else kept)


def _order(balance: Balance) -> tuple[float, float]:
    return round(balance.device, 12), round(balance.node, 12)


def _best(load: Floats, layout: Layout, candidates: Sequence[Ints]) -> Ints:
    """The best of some placements; the first of equals."""
    return min(candidates, key=lambda p: (*_order(balance_of(load, p, layout)), duplicates(p, layout)))


def _will_do(load: Floats, layout: Layout, kept: Ints, bound: float, known: Balance) -> bool:
    """Whether groups on their nodes reach what none is better than."""
    balance = balance_of(load, kept, layout)
    return balance.device <= bound * (1 + CLOSE) and _order(balance) <= _order(known)


def _preferred(load: Floats, layout: Layout, best: Ints, other: Ints, known: Balance, tolerance: float) -> Ints:
    """`other` where it is hardly worse than the best, and better than the greedy wherever that can be."""
    reached, ours = balance_of(load, best, layout), balance_of(load, other, layout)
    improves = ours.device < known.device * (1 - STEP) or reached.device >= known.device * (1 - STEP)
    good = ours.device <= reached.device * tolerance and _order(ours) <= _order(known)
    return other if good and improves else best


def _over_mean(tokens: float, load: Floats, layout: Layout) -> float:
    total = float(load.sum())
    return max(1.0, tokens * layout.devices / total) if total else 1.0


# ---------------------------------------------------------------- ways to a placement


def _free(load: Floats, layout: Layout, budget: int) -> Ints:
    """Without regard to groups: the first replica counts that pack well, then better ones, then better packing."""
    bound = lower_bound(load, layout)

    def packing_of(counts: Ints, work: Work) -> Packing:
        return quick(np.repeat(load / counts, counts), layout.devices, bound, work)

    work = Work(budget // 2)
    counts, packing = None, None
    for tried in first_counts(load, layout):
        if packing is not None and (work.left <= 0 or float((load / tried).max()) >= packing.heaviest):
            continue
        found = packing_of(tried, work)
        if packing is None or found.heaviest < packing.heaviest * (1 - STEP):
            counts, packing = tried, found
        if packing.heaviest <= bound * (1 + CLOSE):
            break
    assert counts is not None and packing is not None
    counts, packing = moved_counts(load, counts, packing, packing_of, bound, work)
    share = np.repeat(load / counts, counts)
    bins = kicked(share, packing, max(bound, float(share.max())), Work(budget // 2)).bins
    expert = np.repeat(np.arange(layout.experts, dtype=np.int64), counts)
    bins = onto_nodes(share, bins, layout, Work(budget // 4))
    bins = even_nodes(share, bins, layout, Work(budget // 4))
    return expert[apart(expert, share, bins, layout)].reshape(-1)


def _near(load: Floats, layout: Layout, now: Ints, enough: float, keep: bool) -> Iterator[Ints]:
    """What a few exchanges make of the placement at hand, until no device has more than `enough`; and itself, last."""
    if keep and not keeps_groups(now, layout):
        return
    counts = np.bincount(now, minlength=layout.experts)
    share, bins = (load / counts)[now], np.arange(layout.replicas, dtype=np.int64).reshape(layout.devices, -1)
    if keep:
        parts = bins.reshape(layout.nodes, -1, layout.slots)
        bins = np.concatenate([descended(share, part, enough, Work(WORK // 8)).bins for part in parts])
    else:
        bins = even_nodes(share, descended(share, bins, enough, Work(WORK // 8)).bins, layout, Work(WORK // 8))
    yield now[bins].reshape(-1)
    yield now
