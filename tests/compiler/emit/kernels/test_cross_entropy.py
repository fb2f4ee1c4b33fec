"""Cross entropy's kernels against their reference ops. The checks are in checks_cross_entropy.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_cross_entropy"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize(("rows", "vocab"), [(0, 33), (1, 1), (45, 61), (7, 1024), (5, 9000)])
def test_cross_entropy(interpret: Interpret, dtype: torch.dtype, rows: int, vocab: int) -> None:
    interpret(CHECKS, "cross_entropy", dtype, rows, vocab)


@dtypes
@pytest.mark.parametrize(
    ("rows", "vocab", "hidden"),
    [
        (0, 33, 16),
        (1, 1, 8),
        (70, 61, 40),  # one tile, partly filled either way
        (300, 1000, 72),  # several tiles either way
        (1100, 60, 8),  # in FP32 more rows of tiles than a band is high
        (9, 8192 + 300, 8),  # more columns than a chunk
        (5, 3 * 8192, 8),  # a first chunk, one between, and a last
    ],
)
def test_linear_cross_entropy(interpret: Interpret, dtype: torch.dtype, rows: int, vocab: int, hidden: int) -> None:
    interpret(CHECKS, "linear_cross_entropy", dtype, rows, vocab, hidden)


@dtypes
@pytest.mark.parametrize(
    "check", ["what_is_no_number_stays_in_its_row", "logits_far_below_zero", "weights_at_any_address"]
)
def test_unusual_inputs(interpret: Interpret, dtype: torch.dtype, check: str) -> None:
    interpret(CHECKS, check, dtype)
