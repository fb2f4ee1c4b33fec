"""The grouped FP8 products in Triton's interpreter. The checks are in checks_grouped_linear_fp8.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_grouped_linear_fp8"


@pytest.mark.parametrize(
    ("out", "inner", "experts", "sizes"),
    [
        (16, 32, 2, (0, 0)),  # no rows at all
        (80, 144, 3, (128, 0, 256)),  # an expert without rows, and one with two tiles
        (144, 64, 1, (384,)),
        (16, 16, 2, (2176, 0)),  # more tiles of rows than a band is high
    ],
)
def test_grouped_linear_fp8(interpret: Interpret, out: int, inner: int, experts: int, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "grouped_linear_fp8", out, inner, experts, sizes)


@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "grouped_linear_fp8_of_random_sizes", seed)


def test_nan_does_not_spread(interpret: Interpret) -> None:
    interpret(CHECKS, "nan_stays_where_it_is")
