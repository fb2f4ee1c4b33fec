"""The gradient of a norm fused with its neighbours, in Triton's interpreter. The checks: checks_norm_gradient.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_norm_gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "columns", "k"), [(0, 33, 2), (1, 1, 1), (7, 33, 3), (45, 192, 2), (5, 1100, 8)])
def test_gradient(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int, k: int) -> None:
    interpret(CHECKS, "gradient", dtype, rows, columns, k)


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
