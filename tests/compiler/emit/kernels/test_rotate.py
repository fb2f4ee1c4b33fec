"""The rotation kernels against their reference ops in Triton's interpreter. The checks: checks_rotate.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SIZES = [
    (9, 3, 2, 6, 1, "pairs"),  # columns before and after the rotated ones, not powers of two
    (9, 3, 0, 6, 0, "turns"),
    (5, 1, 0, 4, 12, "plain"),
    (40, 17, 16, 8, 0, "pairs"),  # more heads than a program has, and a last program that is not full
    (3, 2, 0, 0, 7, "plain"),  # no rotation, only a factor
]


@pytest.mark.parametrize(("documents", "some"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("sequence", "heads", "first", "width", "behind", "ramp"), SIZES)
def test_rotate(
    interpret: Callable[..., Any],
    dtype: torch.dtype,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    behind: int,
    ramp: str,
    documents: bool,
    some: bool,
) -> None:
    sizes = sequence, heads, first, width, behind, ramp, documents, some
    interpret("tests.compiler.emit.kernels.checks_rotate", "rotate", dtype, *sizes)


@pytest.mark.parametrize("stride", [-1, 4, -4])
def test_rotate_rows_with_a_stride(interpret: Callable[..., Any], stride: int) -> None:
    """Entries of several tokens, and rows that are turned back."""
    sizes = 22, 3, 2, 6, 1, "pairs", False, False, stride
    interpret("tests.compiler.emit.kernels.checks_rotate", "rotate", torch.float32, *sizes)
