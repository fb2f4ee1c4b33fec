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
    draw_D = np.arange(DRAWS)
    drawn = SoftmaxSampler(11).draw(np.tile(logits_V, (DRAWS, 1)), draw_D % 50, draw_D // 50)
    counts = np.bincount(drawn.tokens_N, minlength=len(p_V))
    possible = p_V > 0
    assert counts[5] == 0
    assert (((counts - DRAWS * p_V) ** 2)[possible] / (DRAWS * p_V[possible])).sum() < 37.0  # 5 degrees of freedom
    assert abs(drawn.entropy_N[0] + (p_V[possible] * np.log(p_V[possible])).sum()) < 1e-12


def number_of(seed: int, sequence: int, position: int) -> float:
    (number,) = SoftmaxSampler(seed).uniform(np.array([sequence]), np.array([position]))
    return float(number)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**62), st.integers(0, 2**24))
def test_a_number_has_its_place(seed: int, sequence: int, position: int) -> None:
    number = number_of(seed, sequence, position)
    assert 0 <= number < 1 and number == number_of(seed, sequence, position)
    assert number not in (number_of(seed + 1, sequence, position), number_of(seed, sequence + 1, position))
    assert number != number_of(seed, sequence, position + 1)


@given(st.integers(0, 2**63 - 1), st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**24)), min_size=1))
def test_numbers_are_those_of_numpy(seed: int, places: list[tuple[int, int]]) -> None:
    sequence_N, position_N = np.array(places).T
    generators = [np.random.Philox(key=[seed, 0], counter=[0, position, sequence, 0]) for sequence, position in places]
    expected = [np.random.Generator(generator).random() for generator in generators]
    assert SoftmaxSampler(seed).uniform(sequence_N, position_N).tolist() == expected


@pytest.mark.parametrize(
    ("seed", "sequence", "position", "number"),
    [(0, 0, 0, 0.011546754286331562), (1, 2, 3, 0.9337443921724664), (2**63 - 1, 2**62, 2**24, 0.7759274188893206)],
)
def test_numbers_are_pinned(seed: int, sequence: int, position: int, number: float) -> None:
    """A run resumed with a later version draws the same numbers."""
    assert number_of(seed, sequence, position) == number


def test_a_draw_does_not_depend_on_other_sequences() -> None:
    logits_NV = np.random.default_rng(0).normal(size=(40, 33))
    sequence_N, position_N, sampler = np.arange(40) * 7, np.arange(40) % 5, SoftmaxSampler(3)
    together = sampler.draw(logits_NV, sequence_N, position_N)
    for n in range(40):
        alone = sampler.draw(logits_NV[n : n + 1], sequence_N[n : n + 1], position_N[n : n + 1])
        assert (alone.tokens_N, alone.entropy_N) == (together.tokens_N[n], together.entropy_N[n])


def test_tokens_of_probability_zero_are_not_drawn() -> None:
    logits_V = np.full(9, -np.inf)
    logits_V[4] = -1e300
    drawn = SoftmaxSampler(0).draw(np.tile(logits_V, (100, 1)), np.zeros(100, np.int64), np.arange(100))
    assert set(drawn.tokens_N.tolist()) == {4}
