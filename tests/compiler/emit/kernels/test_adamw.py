"""AdamW's kernel against its reference op. The checks are in checks_adamw.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_adamw"


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rounded", [False, True], ids=["one copy", "two copies"])
@pytest.mark.parametrize(
    ("elements", "factor", "decay", "step"),
    [(0, 1.0, 0.1, 1), (1, 1.0, 0.0, 1), (5000, 0.3, 0.1, 1), (2049, 1.0, 0.1, 400)],
)
def test_adamw(
    interpret: Interpret, moments: torch.dtype, rounded: bool, elements: int, factor: float, decay: float, step: int
) -> None:
    interpret(CHECKS, "adamw", moments, elements, rounded, factor, decay, step)


def test_nan_does_not_spread(interpret: Interpret) -> None:
    interpret(CHECKS, "gradients_that_are_no_numbers")
