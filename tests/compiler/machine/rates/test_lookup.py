"""Rates of shapes that have no row in the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.machine.rates.table import rate_at

SHAPES = st.tuples(*[st.integers(1, 2**20)] * 3)
POINTS = st.lists(st.tuples(SHAPES, st.floats(1e9, 1e15)), min_size=1, max_size=8, unique_by=lambda point: point[0])


@given(POINTS)
def test_a_row_has_its_own_rate(points: list[tuple[tuple[int, ...], float]]) -> None:
    for shape, rate in points:
        assert rate_at(points, shape) == rate


@given(POINTS, SHAPES)
def test_rates_are_between_the_extremes_of_the_rows(
    points: list[tuple[tuple[int, ...], float]], shape: tuple[int, ...]
) -> None:
    rates = [rate for _, rate in points]
    assert min(rates) * (1 - 1e-9) <= rate_at(points, shape) <= max(rates) * (1 + 1e-9)
    assert rate_at([(sizes, 2 * rate) for sizes, rate in points], shape) == pytest.approx(2 * rate_at(points, shape))


def test_the_nearer_row_weighs_more() -> None:
    points = [((1024, 64, 64), 100.0), ((4096, 64, 64), 200.0)]
    near, middle, far = (rate_at(points, (rows, 64, 64)) for rows in (1100, 2048, 4000))
    assert 100 < near < middle < far < 200
    assert middle == pytest.approx(2 / (1 / 100 + 1 / 200)), "work of equal weight takes the mean time"
