"""The micro-batches of a step by what attention computes for them: which sample goes where."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.micro_batches import by_cost
from tests.training.samples import RandomSamples

SOURCE = RandomSamples(50, 12)


@given(st.permutations(range(5)), st.integers(1, 3), st.integers(1, 2), st.integers(0, 40))
def test_neighbours_in_cost_share_a_position(order: list[int], data_ranks: int, size: int, first: int) -> None:
    """Each sample is there once, and the position of rank r has the samples of that rank by cost, of all data ranks."""
    samples = np.arange(first, first + len(order) * data_ranks * size)
    found = by_cost(SOURCE, samples, order)
    assert sorted(found) == samples.tolist()
    costs = [[SOURCE.seen(int(i)) for i in part] for part in found.reshape(len(order), -1)]
    every = sorted(SOURCE.seen(int(i)) for i in samples)
    each = data_ranks * size
    assert [sorted(part) for part in costs] == [every[rank * each : (rank + 1) * each] for rank in order]
    assert by_cost(SOURCE, samples, order).tolist() == found.tolist()
