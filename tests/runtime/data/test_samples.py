"""The order of samples: a permutation that differs each epoch and does not depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.files import DataError
from runtime.data.permutation import permute
from runtime.data.samples import Samples
from runtime.data.shards import ShardWriter

SEQUENCE = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """803 training and 103 validation tokens: token j of a split is j, so a window shows where it begins."""
    for split, num in (("train", 803), ("validation", 103)):
        with ShardWriter(tmp_path / split, 1000) as writer:
            writer.add(range(num - 11))
            writer.add(range(num - 11, num))
    return tmp_path


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(num: int, seed: int, epoch: int) -> None:
    assert sorted(permute(i, num, seed, epoch) for i in range(num)) == list(range(num))


def test_permutations_look_random() -> None:
    """Over 4,000 seeds each of 7 indices goes to all places about equally often: χ² of 36 degrees, 5σ from its mean."""
    counts = np.zeros((7, 7))
    for seed in range(4000):
        for place in range(7):
            counts[place, permute(place, 7, seed, 0)] += 1
    expected = 4000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 36 + 5 * (2 * 36) ** 0.5
    distances = [abs(permute(i + 1, 10_000, 3, 0) - permute(i, 10_000, 3, 0)) for i in range(2000)]
    assert abs(np.mean(distances) - 10_000 / 3) < 5 * 2357 / 2000**0.5  # |a - b| of uniform a, b: mean n/3, σ n/√18


def test_huge_corpora_need_no_table() -> None:
    num = 10**15 + 7
    indices = [permute(i, num, 1, 2) for i in range(200)]
    assert all(0 <= f < num for f in indices) and len(set(indices)) == 200


def test_an_epoch_reads_each_window_once_with_its_targets(folder: Path) -> None:
    samples = Samples(folder, "train", SEQUENCE, seed=1)
    assert samples.num_windows == 100  # (803 - 2) // 8
    for epoch in range(3):
        rows = np.stack([samples.tokens(epoch * 100 + i) for i in range(100)])
        assert rows.shape == (100, SEQUENCE + 2) and rows.dtype == np.int64
        assert (np.diff(rows, axis=1) == 1).all()
        assert np.sort(rows[:, :SEQUENCE].reshape(-1)).tolist() == list(range(800))
    order = [samples.window(i) for i in range(200)]
    assert order[:100] != order[100:] and order[:100] != sorted(order[:100])


def test_validation_is_in_order_and_does_not_repeat(folder: Path) -> None:
    samples = Samples(folder, "validation", SEQUENCE, seed=9)
    assert samples.num_windows == 12
    assert [samples.tokens(i)[0] for i in range(12)] == [8 * i for i in range(12)]
    with pytest.raises(AssertionError, match="the validation split is read once"):
        samples.tokens(12)


def test_last_window_ends_with_the_stream(folder: Path) -> None:
    samples = Samples(folder, "train", 801, seed=1)
    assert samples.num_windows == 1 and samples.tokens(5).tolist() == list(range(803))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_order_does_not_depend_on_the_number_of_ranks(folder: Path, num_ranks: int) -> None:
    """Each rank opens the data and reads its share of every batch of 12, in its own order."""
    reference = Samples(folder, "train", SEQUENCE, seed=4)
    wanted = [reference.tokens(i).tolist() for i in range(120)]
    tokens: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        samples = Samples(folder, "train", SEQUENCE, seed=4)
        for step in reversed(range(10)):
            for i in range(step * 12 + rank, (step + 1) * 12, num_ranks):
                tokens[i] = samples.tokens(i).tolist()
    assert [tokens[i] for i in range(120)] == wanted


def test_order_depends_on_the_seed(folder: Path) -> None:
    orders = {tuple(Samples(folder, "train", SEQUENCE, seed=seed).window(i) for i in range(100)) for seed in range(20)}
    assert len(orders) == 20


def test_order_is_pinned() -> None:
    """A change would silently train every run in another order."""
    assert [permute(i, 10, seed=1, epoch=0) for i in range(10)] == [6, 0, 5, 8, 2, 7, 3, 9, 1, 4]
    assert permute(12345, 10**9, seed=1, epoch=3) == 475041832


def test_a_text_shorter_than_a_sample_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"validation\.bin: 103 validation tokens, fewer than one sample of 104"):
        Samples(folder, "validation", 102, seed=1)
    assert Samples(folder, "validation", 101, seed=1).num_windows == 1
