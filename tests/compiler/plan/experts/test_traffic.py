"""Copies of a token: exact under the assumption, and within the bounds for any choices of tokens."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

from compiler.plan.experts.layer_search import place_layer
from compiler.plan.experts.layout import ExpertLayout, TokenRouting, copies, default_placement


def test_independent_experts_exactly() -> None:
    """One group: every set of experts, with its probability."""
    load, layout = np.array([4.0, 1.0, 2.0, 1.0, 3.0, 1.0]), ExpertLayout(6, 1, 3, 3)
    chosen = load / load.sum() * 2
    expected = 0.0
    for picks in product((0, 1), repeat=6):
        chance = prod(p if t else 1 - p for p, t in zip(chosen, picks, strict=True))
        expected += chance * len({e // 2 for e, t in enumerate(picks) if t})
    estimate = copies(load, default_placement(layout), layout, TokenRouting(2, 1, 100), 3)
    assert estimate.expected == pytest.approx(min(expected, 2))
    assert estimate.upper == 2 and estimate.lower == pytest.approx(chosen[0] + chosen[2] + chosen[4])


@pytest.mark.parametrize("seed", range(6))
def test_bounds_hold_for_tokens_however_they_choose(seed: int) -> None:
    """Tokens that prefer some experts together still make a number of copies within the bounds."""
    random, tokens, top_k, top_groups = np.random.default_rng(seed), 400, 3, 2
    favour = random.normal(size=24) + 2 * random.normal(size=(5, 24))[random.integers(0, 5, tokens)]
    score = favour + 0.5 * random.normal(size=(tokens, 24))
    best = np.argsort(-score.reshape(tokens, 4, 6).max(axis=2), axis=1)[:, :top_groups]
    allowed = np.zeros((tokens, 4), dtype=bool)
    np.put_along_axis(allowed, best, True, axis=1)
    score[~np.repeat(allowed, 6, axis=1)] = -np.inf
    experts = np.argsort(-score, axis=1)[:, :top_k]
    load = np.bincount(experts.reshape(-1), minlength=24).astype(float)
    layout, routing = ExpertLayout(24, 4, 4, 8), TokenRouting(top_k, top_groups, 1)
    for physical in (default_placement(layout), place_layer(load, layout, "ignore").physical):
        place = np.argsort(physical)
        for parts in (4, 8):
            reached = place[experts] // (24 // parts)
            actual = np.mean([len(set(row)) for row in reached.tolist()])
            estimate = copies(load, physical, layout, routing, parts)
            assert estimate.lower - 1e-9 <= actual <= estimate.upper + 1e-9
            assert estimate.lower - 1e-9 <= estimate.expected <= estimate.upper + 1e-9


def test_whole_groups_limit_the_nodes_of_a_token() -> None:
    load, layout, routing = np.ones(64), ExpertLayout(64, 8, 8, 16), TokenRouting(8, 3, 1)
    together = copies(load, default_placement(layout), layout, routing, 8)
    split = copies(load, np.arange(64).reshape(8, 8).T.reshape(-1), layout, routing, 8)
    assert together.upper == 3 and together.expected < 3 < split.expected <= split.upper == 8


def test_links_count_the_copies_that_leave_the_node() -> None:
    estimate = copies(np.ones(4), np.arange(4), ExpertLayout(4, 1, 4, 4), TokenRouting(4, 1, 10), 4)
    assert estimate.expected == 4 and estimate.over_links(4) == 3 and estimate.busiest == 1


def test_no_load() -> None:
    estimate = copies(np.zeros(4), np.arange(4), ExpertLayout(4, 1, 2, 2), TokenRouting(2, 1, 10), 2)
    assert (estimate.expected, estimate.lower, estimate.upper, estimate.busiest) == (0, 0, 0, 0)
