"""The published algorithm and its guarantees."""

from __future__ import annotations

import numpy as np

from compiler.plan.experts.layout import ExpertLayout, keeps_groups
from compiler.plan.experts.pack import global_, greedy, hierarchical, pack_bins
from tests.compiler.plan.experts.loads import load_of


def test_each_step_takes_the_lightest_place() -> None:
    """Groups of load 9, 5, 4, 2 on two nodes: 9 and 2, 5 and 4. Then the experts of each node go to its two devices."""
    load, layout = np.array([8.0, 1, 3, 2, 3, 1, 1, 1]), ExpertLayout(8, 4, 2, 4)
    assert hierarchical(load, layout).tolist() == greedy(load, layout).tolist() == [0, 7, 1, 6, 2, 3, 4, 5]


def test_global_where_groups_do_not_divide() -> None:
    load, layout = load_of("uniform", 12), ExpertLayout(12, 4, 3, 6)
    assert not layout.groups_divide
    assert greedy(load, layout).tolist() == global_(load, layout).tolist()


def test_hierarchical_keeps_groups_on_nodes() -> None:
    for seed in range(20):
        layout = ExpertLayout(32, 8, 4, 16)
        assert keeps_groups(hierarchical(load_of("lognormal", 32, seed), layout), layout)


def test_packing_is_longest_first_with_a_limit() -> None:
    assert pack_bins(np.array([5.0, 1.0, 4.0, 4.0]), 2).tolist() == [[0, 1], [2, 3]]
    assert pack_bins(np.array([9.0, 1.0, 1.0, 1.0]), 2).tolist() == [[0, 3], [1, 2]]  # by then the second bin is full
