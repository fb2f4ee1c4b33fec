"""The grouped products in Triton's interpreter. The checks are in checks_grouped_linear.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_grouped_linear"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize(
    ("out", "inner", "experts", "sizes"),
    [
        (8, 16, 2, (0, 0)),  # no rows at all
        (40, 24, 5, (1, 1, 1, 1, 1)),
        (70, 33, 6, (3, 0, 50, 1, 7, 0)),  # experts without rows, rows at odd addresses
        (136, 72, 3, (0, 140, 205)),  # an expert's rows fill several tiles
        (264, 320, 1, (140,)),  # several tiles either way, the last ones partly filled
        (128, 64, 3, (180, 3, 8)),  # weights that come by blocks
        (24, 40, 3, (0, 2100, 0)),  # all rows to one expert, in more tiles than a band is high and programs run
    ],
)
def test_grouped_linear(
    interpret: Interpret, dtype: torch.dtype, out: int, inner: int, experts: int, sizes: tuple[int, ...]
) -> None:
    interpret(CHECKS, "grouped_linear", dtype, out, inner, experts, sizes)


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "grouped_linear_of_random_sizes", seed)


@dtypes
@pytest.mark.parametrize(("out", "inner"), [(40, 24), (40, 64), (64, 24), (64, 64)])
def test_nan_does_not_spread(interpret: Interpret, dtype: torch.dtype, out: int, inner: int) -> None:
    interpret(CHECKS, "grouped_linear_with_nan", dtype, out, inner)
