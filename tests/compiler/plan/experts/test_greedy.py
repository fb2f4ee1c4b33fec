"""The published algorithm: its published example, and what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.plan.experts.layout import ExpertLayout, keeps_groups
from compiler.plan.experts.pack import global_, greedy, hierarchical, packed, replicate
from tests.compiler.plan.experts.loads import compositions, load_of

# The example of its public repository: 12 experts in 4 groups, 16 replicas on 8 devices of 2 nodes.
LOAD = (
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86),
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27),
)
PUBLISHED = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)


@pytest.mark.parametrize("layer", [0, 1])
def test_published_example(layer: int) -> None:
    load, layout = np.array(LOAD[layer], dtype=np.float64), ExpertLayout(12, 16, 4, 2, 8)
    assert tuple(hierarchical(load, layout).tolist()) == PUBLISHED[layer]
    assert tuple(greedy(load, layout).tolist()) == PUBLISHED[layer]


def test_global_where_groups_do_not_divide() -> None:
    load, layout = load_of("uniform", 12), ExpertLayout(12, 12, 4, 3, 6)
    assert not layout.groups_divide
    assert greedy(load, layout).tolist() == global_(load, layout).tolist()


def test_hierarchical_keeps_groups_on_nodes() -> None:
    for seed in range(20):
        layout = ExpertLayout(24, 32, 8, 4, 16)
        assert keeps_groups(hierarchical(load_of("lognormal", 24, seed), layout), layout)


@pytest.mark.parametrize("kind", ["uniform", "zipf", "few", "equal"])
def test_no_counts_make_the_heaviest_replica_lighter(kind: str) -> None:
    for experts, slots in ((1, 5), (3, 7), (4, 8), (5, 5)):
        load = load_of(kind, experts, slots)
        counts, order = replicate(load, slots)
        assert counts.sum() == slots and np.bincount(order, minlength=experts).tolist() == counts.tolist()
        best = min(max(load / np.array(each)) for each in compositions(slots, experts))
        assert max(load / counts) == best


def test_packing_is_longest_first_with_a_limit() -> None:
    assert packed(np.array([5.0, 1.0, 4.0, 4.0]), 2).tolist() == [[0, 1], [2, 3]]
    assert packed(np.array([9.0, 1.0, 1.0, 1.0]), 2).tolist() == [[0, 3], [1, 2]]  # the second bin is full by then
