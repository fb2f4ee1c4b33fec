"""The norm of gradients, against float64."""

from __future__ import annotations

import pytest
import torch

from runtime.optimizer import NORM_ROW, square_sum


@pytest.mark.parametrize("elements", [0, 1, NORM_ROW - 1, NORM_ROW, 5 * NORM_ROW + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_of_squares_is_that_of_float64(elements: int, dtype: torch.dtype) -> None:
    flat = torch.randn(elements, dtype=dtype, generator=torch.Generator().manual_seed(elements))
    found, expected = square_sum(flat), flat.double().square().sum()
    assert found.dtype == torch.float64
    # of a row's norm, squared: its additions round it by so many units at most, most of them by far fewer
    bound = 2 * NORM_ROW * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=bound, atol=0.0)
    if dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0.0)


def test_one_huge_gradient_is_not_lost_among_many_small_ones() -> None:
    flat = torch.full((1 << 20,), 1e-3)
    flat[12345] = 1e6
    torch.testing.assert_close(square_sum(flat), flat.double().square().sum(), rtol=1e-6, atol=0.0)
    flat[12345] = 1e30  # its square is no float32
    torch.testing.assert_close(square_sum(flat), flat.double().square().sum(), rtol=1e-12, atol=0.0)
    flat[0] = torch.nan
    assert square_sum(flat).isnan()
