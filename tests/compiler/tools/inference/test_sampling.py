"""Sampling, and the exact proof by enumeration that drafts change no probability."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiler.tools.inference.generation import Sampler, acceptance, instead

WEIGHTS = st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any)


def shares(weights: list[int]) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@given(
    st.integers(2, 6).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 5), min_size=n, max_size=n).filter(any)] * 2)
    )
)
def test_accepting_or_replacing_drafts_keeps_the_probabilities_of_the_model(weights: tuple[list[int], ...]) -> None:
    """Over all drafts, accepted or not: Σ_x q(x)·(a(x)·[x] + (1 − a(x))·instead) = p."""
    p_V, q_V = map(shares, weights)
    taken_V = acceptance(p_V, q_V)
    assert ((taken_V >= 0) & (taken_V <= 1)).all()
    result_V = q_V * taken_V
    if (refused := float((q_V * (1 - taken_V)).sum())) > 1e-12:
        result_V = result_V + refused * instead(p_V, q_V)
    assert torch.allclose(result_V, p_V, rtol=0, atol=1e-12)


@given(WEIGHTS, st.floats(0.05, 1.0))
def test_top_p_keeps_the_fewest_that_are_enough(weights: list[int], top_p: float) -> None:
    logits_V = torch.tensor(weights, dtype=torch.float64)
    p_V, kept_V = Sampler(1.0, 1.0).probabilities(logits_V), Sampler(1.0, top_p).probabilities(logits_V)
    is_kept = kept_V > 0
    assert math.isclose(float(kept_V.sum()), 1.0, abs_tol=1e-12)
    assert float(p_V[is_kept].sum()) >= top_p - 1e-12
    assert float(p_V[is_kept].sum() - p_V[is_kept].min()) < top_p
    assert is_kept.all() or float(p_V[is_kept].min()) >= float(p_V[~is_kept].max())
    assert torch.allclose(kept_V[is_kept], p_V[is_kept] / p_V[is_kept].sum())


def test_temperature_divides_logits() -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0])
    assert torch.allclose(Sampler(0.5).probabilities(logits_V), torch.softmax(logits_V.double() * 2, dim=0))
    assert Sampler(0.0).probabilities(logits_V).tolist() == [0, 1, 0]
    assert Sampler(0.0).probabilities(torch.tensor([1.0, 3.0, 3.0])).tolist() == [0, 1, 0], "the first of equals"
    for temperature in (1e-3, 5e-324):
        assert Sampler(temperature).probabilities(logits_V * 1e3).tolist() == [0, 1, 0]


def test_draws_depend_on_the_seed() -> None:
    p_V = torch.softmax(torch.arange(50.0).double() / 20, dim=0)
    rows = [[sampler.draw(p_V) for _ in range(20)] for sampler in (Sampler(1.0, seed=s) for s in (1, 1, 2))]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize(("p", "q", "expected"), [([1, 0], [0, 1], 0.0), ([1, 1], [1, 0], 0.5), ([1, 0], [1, 0], 1.0)])
def test_drafts_are_accepted_with_the_right_probability(p: list[int], q: list[int], expected: float) -> None:
    sampler, p_V, q_V = Sampler(1.0), shares(p), shares(q)
    token = int(q_V.argmax())
    outcomes = Counter(sampler.accepts(p_V, q_V, token) for _ in range(2000))
    assert abs(outcomes[True] / 2000 - expected) < 0.04
    assert expected not in (0.0, 1.0) or outcomes[bool(expected)] == 2000
