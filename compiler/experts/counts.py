"""How many replicas each expert has: ways to begin with, and one replica moved to another expert at a time.

The greedy way makes the heaviest replica lightest, which no other does better; but a device is as heavy as all its
slots together, and then small replicas that fill up devices can be worth more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import comb

import numpy as np

from compiler.experts.greedy import replicate
from compiler.experts.layout import Floats, Ints, Layout
from compiler.experts.pack import CLOSE, STEP, Packing, Work

MAX_ALL = 500  # ways to give replicas, of which all are tried
MAX_WAYS = 12
MAX_GIVERS = 12  # experts that a replica is taken from, those whose others get least
MAX_TAKERS = 12  # experts that it is given to: those on the heaviest device, then the lightest and the heaviest

Pack = Callable[[Ints, Work], Packing]


def first_counts(load: Floats, layout: Layout) -> Iterator[Ints]:
    """Counts of replicas to try: the greedy ones, then all others; or if those are too many, some near the greedy.

    These give fewer replicas greedily, and the rest evenly to all experts, the lightest first.
    """
    greedy, _ = replicate(load, layout.replicas)
    yield greedy
    spare = layout.replicas - layout.experts
    if layout.slots == 1:
        return
    if comb(layout.replicas - 1, layout.experts - 1) <= MAX_ALL:
        for ends in combinations(range(1, layout.replicas), layout.experts - 1):
            yield np.diff([0, *ends, layout.replicas]).astype(np.int64)
        return
    for kept in sorted({spare * step // MAX_WAYS for step in range(MAX_WAYS)} - {spare}, reverse=True):
        counts, _ = replicate(load, layout.experts + kept)
        each, more = divmod(spare - kept, layout.experts)
        counts += each
        counts[np.argsort(load / counts, kind="stable")[:more]] += 1
        yield counts


def moved_counts(
    load: Floats, counts: Ints, packing: Packing, pack: Pack, target: float, work: Work
) -> tuple[Ints, Packing]:
    """Hill climbing: take a replica from one expert and give it to another while the heaviest device gets lighter."""
    moved = True
    while moved and packing.heaviest > target * (1 + CLOSE):
        moved = False
        for giver, taker in _moves(load, counts, packing.bins):
            if work.left <= 0:
                return counts, packing
            other = counts.copy()
            other[giver] -= 1
            other[taker] += 1
            if float((load / other).max()) >= packing.heaviest:
                work.spend(0)
                continue
            tried = pack(other, work)
            if tried.heaviest < packing.heaviest * (1 - STEP):
                counts, packing, moved = other, tried, True
                break
    return counts, packing


def _moves(load: Floats, counts: Ints, devices: Ints) -> Iterator[tuple[int, int]]:
    """(giver, taker), the most promising first."""
    expert = np.repeat(np.arange(len(load)), counts)
    share = load / counts
    heaviest = expert[devices[share[expert][devices].sum(axis=1).argmax()]]
    several = np.flatnonzero(counts > 1)
    givers = several[np.argsort(load[several] / (counts[several] - 1), kind="stable")][:MAX_GIVERS]
    order = np.argsort(share, kind="stable")
    takers = list(dict.fromkeys([*heaviest.tolist(), *order[:4].tolist(), *order[::-1].tolist()]))[:MAX_TAKERS]
    yield from ((int(giver), taker) for taker in takers for giver in givers if giver != taker)
