"""Loads and layouts of every kind for the tests, and the best placement found by trying all."""

from __future__ import annotations

from math import gcd

import numpy as np
from hypothesis import strategies as st

from compiler.plan.experts.layout import ExpertLayout, Floats

KINDS = ("uniform", "zipf", "hot", "equal", "zeros", "few", "lognormal", "real")


def load_of(kind: str, experts: int, seed: int = 0) -> Floats:
    random = np.random.default_rng(seed)
    loads = {
        "uniform": lambda: random.integers(0, 1000, experts),
        "zipf": lambda: random.permutation(np.round(1e5 / np.arange(1, experts + 1) ** 1.3)),
        "hot": lambda: np.where(np.arange(experts) == seed % experts, 10**6, 1),
        "equal": lambda: np.full(experts, 7),
        "zeros": lambda: np.zeros(experts),
        "few": lambda: np.where(np.arange(experts) % 3 == 0, random.integers(1, 9, experts), 0),
        "lognormal": lambda: np.round(1e6 * random.lognormal(0, 1, experts)),
        "real": lambda: random.random(experts),
    }
    return loads[kind]().astype(np.float64)


@st.composite
def layouts(draw: st.DrawFn, most_slots: int = 6) -> ExpertLayout:
    nodes, groups = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2, 4, 6, 8)))
    devices = nodes * draw(st.integers(1, 4))
    experts = devices * draw(st.integers(1, most_slots))
    return ExpertLayout(experts, gcd(groups, experts), nodes, devices)


def best_device_load(load: Floats, layout: ExpertLayout) -> float:
    """Tokens of the busiest device in the best placement, found by trying all packings."""
    return packed_best(sorted(load.tolist(), reverse=True), layout.devices, layout.slots, np.inf)


def packed_best(shares: list[float], num_bins: int, places: int, below: float) -> float:
    """The lowest possible load of the fullest bin, found by a depth-first search that tries equal bins once."""
    sums, counts, best = [0.0] * num_bins, [0] * num_bins, below

    def place(index: int) -> None:
        nonlocal best
        if index == len(shares):
            best = max(sums)
            return
        seen = set()
        for b in range(num_bins):
            if counts[b] == places or (sums[b], counts[b]) in seen or sums[b] + shares[index] >= best:
                continue
            seen.add((sums[b], counts[b]))
            sums[b] += shares[index]
            counts[b] += 1
            place(index + 1)
            sums[b] -= shares[index]
            counts[b] -= 1

    place(0)
    return best
