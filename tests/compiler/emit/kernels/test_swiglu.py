"""The SwiGLU kernels against their reference ops in Triton's interpreter. The checks are in checks_swiglu.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_swiglu"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
scales = pytest.mark.parametrize("pow2", [False, True], ids=["plain", "pow2"])
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
tiles = pytest.mark.parametrize(("rows", "inner"), [(0, 128), (1, 128), (45, 256), (130, 384)])


@dtypes
@gates
@pytest.mark.parametrize(("rows", "inner"), [(0, 33), (1, 4), (7, 33), (45, 192), (5, 2500)])
def test_swiglu(interpret: Interpret, dtype: torch.dtype, rows: int, inner: int, gated: bool) -> None:
    interpret(CHECKS, "swiglu", dtype, rows, inner, gated)


@gates
@tiles
def test_eight_bits(interpret: Interpret, rows: int, inner: int, gated: bool) -> None:
    interpret(CHECKS, "of_eight_bits", rows, inner, gated)


@gates
@scales
@tiles
def test_quantised(interpret: Interpret, rows: int, inner: int, gated: bool, pow2: bool) -> None:
    interpret(CHECKS, "quantised", rows, inner, gated, pow2)


@gates
@scales
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@tiles
def test_quantised_gradient(interpret: Interpret, rows: int, inner: int, gated: bool, fp8: bool, pow2: bool) -> None:
    interpret(CHECKS, "quantised_gradient", rows, inner, gated, fp8, pow2)


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
