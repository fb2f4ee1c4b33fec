"""Micro-batches ordered by the cost of attention: which sample goes where."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.order import Order
from runtime.data.samples import RowSamples, Samples
from runtime.data.shards import RowWriter, ShardWriter
from runtime.step.micro_batches import order_by_cost
from tests.runtime.step.samples import RandomSamples

SOURCE = RandomSamples(50, 12)
Numbers = npt.NDArray[np.int64]


@given(st.permutations(range(5)), st.integers(1, 3), st.integers(1, 2), st.integers(0, 40))
def test_neighbours_in_cost_share_a_position(order: list[int], data_ranks: int, size: int, first: int) -> None:
    """Each sample is there once, and the position of rank r has the samples of that rank by cost, of all data ranks."""
    samples = np.arange(first, first + len(order) * data_ranks * size)
    ordered = order_by_cost(SOURCE, samples, order)
    assert sorted(ordered) == samples.tolist()
    costs = [SOURCE.causal_pairs(part).tolist() for part in ordered.reshape(len(order), -1)]
    every = sorted(SOURCE.causal_pairs(samples).tolist())
    share = data_ranks * size
    assert [sorted(part) for part in costs] == [every[rank * share : (rank + 1) * share] for rank in order]
    assert order_by_cost(SOURCE, samples, order).tolist() == ordered.tolist()


# ---------------------------------------------------------------- the same, sample by sample


def pairs(lengths: Numbers) -> int:
    return int((lengths * (lengths + 1) // 2).sum())


def seen_in_text(samples: Samples, index: int) -> int:
    first = samples.window(index) * samples.sequence
    end = first + samples.sequence
    a, b = np.searchsorted(samples.reader.starts, (first + 1, end))
    return pairs(np.diff([first, *samples.reader.starts[a:b], end]))


def seen_in_rows(samples: RowSamples, index: int) -> int:
    sizes = np.minimum(samples.survey.reader.sizes[samples.rows(samples.window(index))], samples.sequence)
    return pairs(np.append(sizes, samples.sequence - sizes.sum()))


def put(samples: Numbers, seen: list[int], order: list[int]) -> list[int]:
    """The position of each sample, by its cost of attention."""
    ranked = [int(samples[k]) for k in sorted(range(len(samples)), key=lambda k: seen[k])]
    share = len(samples) // len(order)
    parts = [ranked[k * share : (k + 1) * share][:: -1 if k % 2 else 1] for k in range(len(order))]
    return [sample for rank in order for sample in parts[rank]]


@st.composite
def steps(draw: st.DrawFn) -> tuple[Numbers, list[int]]:
    """The samples of a step, over several epochs and with gaps, and an order of its micro-batches."""
    order = draw(st.permutations(range(draw(st.integers(1, 6)))))
    gaps = draw(st.lists(st.integers(1, 9), min_size=3 * len(order), max_size=3 * len(order)))
    return draw(st.integers(0, 60)) + np.cumsum(gaps), list(order)


@given(st.lists(st.integers(1, 15), min_size=6, max_size=40), st.integers(1, 12), st.sampled_from([0, 2]), steps())
@settings(max_examples=30)
def test_text_samples_are_placed_as_one_by_one(
    sizes: list[int], sequence: int, parts: int, step: tuple[Numbers, list[int]]
) -> None:
    samples, order = step
    with TemporaryDirectory() as name:
        with ShardWriter(Path(name) / "train", 100) as writer:
            for size in (*sizes, 30):
                writer.add([7] * size)
        pieces = (sum(sizes) + 28) // (parts * sequence) if parts else 0
        drawn = Order(sequence, parts * pieces, 5, parts * sequence, parts * sequence, None) if pieces else None
        text = Samples(Path(name), "train", sequence, 2, seed=3, order=drawn)
        costs = [seen_in_text(text, index) for index in samples.tolist()]
        assert text.windows(samples).tolist() == [text.window(index) for index in samples.tolist()]
        assert text.causal_pairs(samples).tolist() == costs
        assert order_by_cost(text, samples, order).tolist() == put(samples, costs, order)


@given(st.lists(st.integers(1, 15), min_size=1, max_size=40), st.integers(5, 20), st.booleans(), steps())
@settings(max_examples=30)
def test_rows_are_placed_as_one_by_one(
    sizes: list[int], sequence: int, pack: bool, step: tuple[Numbers, list[int]]
) -> None:
    samples, order = step
    with TemporaryDirectory() as name:
        with RowWriter(Path(name) / "train", 100) as writer:
            for size in (*sizes, 3):
                writer.add(np.full(size, 7))
        rows = RowSamples(Path(name), "train", sequence, seed=3, long="cut", pack=pack)
        costs = [seen_in_rows(rows, index) for index in samples.tolist()]
        assert rows.windows(samples).tolist() == [rows.window(index) for index in samples.tolist()]
        assert rows.causal_pairs(samples).tolist() == costs
        assert order_by_cost(rows, samples, order).tolist() == put(samples, costs, order)


@given(st.integers(1, 3000), st.integers(0, 5), st.integers(0, 2000), st.integers(1, 400), st.sampled_from([0, 1, 4]))
@settings(max_examples=60)
def test_windows_of_many_samples_equal_those_one_by_one(
    windows: int, seed: int, first: int, count: int, parts: int
) -> None:
    """Including runs with phases, which permute the parts within pieces."""
    order = Order(8, windows, seed)
    if parts:
        order = Order(8, windows * parts, seed, 8 * parts, first // parts * 8 * parts, (first + 900) * 8 * parts)
    indices = first + np.arange(count)
    assert order.windows_of(indices).tolist() == [order.window(index) for index in indices.tolist()]
