"""The kernels of E5M6 against their reference ops in Triton's interpreter. The checks: checks_quantise_e5m6.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_quantise_e5m6"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (1, 1), (7, 33), (130, 128), (140, 300)])
def test_casts(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int) -> None:
    interpret(CHECKS, "casts", dtype, rows, columns)


def test_every_code(interpret: Interpret) -> None:
    interpret(CHECKS, "codes")


def test_zeros_infinities_and_nan(interpret: Interpret) -> None:
    interpret(CHECKS, "special")


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
