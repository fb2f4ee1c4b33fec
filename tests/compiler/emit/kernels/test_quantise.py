"""The quantising kernels against their reference ops in Triton's interpreter. The checks are in checks_quantise.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_quantise"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
scales = pytest.mark.parametrize("pow2", [False, True], ids=["plain", "pow2"])


@dtypes
@scales
@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (1, 1), (7, 33), (130, 128), (300, 576)])
def test_casts(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int, pow2: bool) -> None:
    interpret(CHECKS, "casts", dtype, rows, columns, pow2)


@dtypes
@scales
@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (3, 128, 256), (2, 5, 129)], ids=str)
def test_blocks(interpret: Interpret, dtype: torch.dtype, shape: tuple[int, ...], pow2: bool) -> None:
    interpret(CHECKS, "blocks", dtype, shape, pow2)


def test_zeros_infinities_and_nan(interpret: Interpret) -> None:
    interpret(CHECKS, "special")


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
