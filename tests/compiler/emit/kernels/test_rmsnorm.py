"""The RMSNorm kernels against their reference ops in Triton's interpreter. The checks are in checks_rmsnorm.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_rmsnorm"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
scales = pytest.mark.parametrize("pow2", [False, True], ids=["plain", "pow2"])
sizes = pytest.mark.parametrize(("rows", "columns"), [(0, 33), (1, 1), (7, 33), (45, 192), (5, 1100)])


@dtypes
@sizes
def test_rmsnorm(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int) -> None:
    interpret(CHECKS, "rmsnorm", dtype, rows, columns)


@dtypes
@sizes
def test_with_the_residual(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int) -> None:
    interpret(CHECKS, "fused", dtype, rows, columns)


@dtypes
@pytest.mark.parametrize(("rows", "heads", "columns"), [(0, 3, 33), (1, 1, 1), (7, 3, 33), (45, 5, 128)])
def test_heads(interpret: Interpret, dtype: torch.dtype, rows: int, heads: int, columns: int) -> None:
    interpret(CHECKS, "heads", dtype, rows, heads, columns)


@dtypes
@scales
@sizes
def test_quantised(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int, pow2: bool) -> None:
    interpret(CHECKS, "quantised", dtype, rows, columns, pow2)


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
