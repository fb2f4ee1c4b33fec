"""Sampling tokens: by the probabilities, depending only on the seed, the sequence and the position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.next_tokens import SoftmaxSampler

DRAWS = 20_000


def test_frequencies_equal_the_probabilities() -> None:
    """Pearson's statistic of many draws is below the value that it exceeds once in a million."""
    logits_V = np.array([0.0, 1.0, -2.0, 3.0, 2.5, -np.inf, 0.5])
    p_V = np.exp(logits_V) / np.exp(logits_V).sum()
    drawn = [SoftmaxSampler(11).draw(logits_V, i % 50, i // 50) for i in range(DRAWS)]
    counts = np.bincount([draw.token for draw in drawn], minlength=len(p_V))
    possible = p_V > 0
    assert counts[5] == 0
    assert (((counts - DRAWS * p_V) ** 2)[possible] / (DRAWS * p_V[possible])).sum() < 37.0  # 5 degrees of freedom
    assert abs(drawn[0].entropy + (p_V[possible] * np.log(p_V[possible])).sum()) < 1e-12


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 2**24))
def test_a_number_has_its_place(seed: int, sequence: int, position: int) -> None:
    number = SoftmaxSampler(seed).uniform(sequence, position)
    assert 0 <= number < 1 and number == SoftmaxSampler(seed).uniform(sequence, position)
    samplers = SoftmaxSampler(seed + 1), SoftmaxSampler(seed)
    assert number not in (samplers[0].uniform(sequence, position), samplers[1].uniform(sequence + 1, position))
    assert number != samplers[1].uniform(sequence, position + 1)


@pytest.mark.parametrize(
    ("seed", "sequence", "position", "number"),
    [(0, 0, 0, 0.011546754286331562), (1, 2, 3, 0.9337443921724664), (2**63 - 1, 2**62, 2**24, 0.7759274188893206)],
)
def test_numbers_are_pinned(seed: int, sequence: int, position: int, number: float) -> None:
    """A run resumed with a later version draws the same numbers."""
    assert SoftmaxSampler(seed).uniform(sequence, position) == number


def test_tokens_of_probability_zero_are_not_drawn() -> None:
    logits_V = np.full(9, -np.inf)
    logits_V[4] = -1e300
    assert {SoftmaxSampler(0).draw(logits_V, 0, i).token for i in range(100)} == {4}
