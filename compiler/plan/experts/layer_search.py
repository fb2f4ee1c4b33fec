"""The placement of one layer: how many replicas each expert has, and which devices they are on.

It is never worse than the published greedy algorithm, in either of its two forms: both are among what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compiler.plan.experts.greedy import global_, hierarchical, lower_bound
from compiler.plan.experts.layout import (
    Balance,
    Floats,
    Ints,
    Layout,
    PlaceError,
    aligned,
    balance_of,
    duplicates,
    keeps_groups,
)
from compiler.plan.experts.nodes import apart, even_nodes, on_nodes, onto_nodes
from compiler.plan.experts.pack import CLOSE, STEP, Packing, Work, descended, first_counts, kicked, moved_counts, quick

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
    keeps_groups: bool  # every group on one node
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
    published = [global_(load, layout)]
    if layout.groups_divide:
        published.insert(0, hierarchical(load, layout))
    best_published = min((balance_of(load, physical, layout) for physical in published), key=_order)
    bound = _over_mean(lower_bound(load, layout), load, layout)
    grouped = free = None
    if layout.groups_divide and rule != "ignore":
        found, least = on_nodes(load, layout, _free, WORK // 2)
        grouped = _best(load, layout, [found, published[0]])
    if rule == "keep":
        bound = max(bound, _over_mean(least, load, layout))
        best_published = balance_of(load, published[0], layout)
    elif grouped is None or not _will_do(load, layout, grouped, bound, best_published):
        free = _best(load, layout, [_free(load, layout, WORK), *published])
    chosen = grouped if free is None else free
    assert chosen is not None
    if grouped is not None and free is not None:
        chosen = _preferred(load, layout, free, grouped, best_published, KEEP_TOLERANCE)
    if now is not None and steady:
        enough = balance_of(load, chosen, layout).device * NEAR_TOLERANCE * load.sum() / layout.devices
        for near in _near(load, layout, now, float(enough) * (1 - CLOSE), keep=chosen is grouped):
            chosen = _preferred(load, layout, chosen, near, best_published, NEAR_TOLERANCE)
    if now is not None:
        chosen = aligned(chosen, now, layout)
    whole_groups = keeps_groups(chosen, layout)
    reached, greedy = balance_of(load, chosen, layout), balance_of(load, published[0], layout)
    return Placed(chosen, reached, bound, whole_groups, greedy, None if whole_groups else grouped)


def _order(balance: Balance) -> tuple[float, float]:
    return round(balance.device, 12), round(balance.node, 12)


def _best(load: Floats, layout: Layout, candidates: Sequence[Ints]) -> Ints:
    """The best of some placements; the first of equals."""
    return min(candidates, key=lambda p: (*_order(balance_of(load, p, layout)), duplicates(p, layout)))


def _will_do(load: Floats, layout: Layout, grouped: Ints, bound: float, published: Balance) -> bool:
    """Whether groups on their nodes reach what none is better than."""
    balance = balance_of(load, grouped, layout)
    return balance.device <= bound * (1 + CLOSE) and _order(balance) <= _order(published)


def _preferred(load: Floats, layout: Layout, first: Ints, other: Ints, published: Balance, tolerance: float) -> Ints:
    """`other` where it is hardly worse than `first`, and better than the greedy wherever that can be."""
    reached, ours = balance_of(load, first, layout), balance_of(load, other, layout)
    improves = ours.device < published.device * (1 - STEP) or reached.device >= published.device * (1 - STEP)
    good = ours.device <= reached.device * tolerance and _order(ours) <= _order(published)
    return other if good and improves else first


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
