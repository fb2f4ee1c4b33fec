"""The kernels that scale logits part by part against their ops in Triton's interpreter. The checks:
checks_scale_parts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_scale_parts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("rows", "logits", "parts"),
    [(0, 24, 3), (1, 3, 3), (70, 24, 3), (500, 80, 1), (1000, 24, 3), (300, 15, 3), (9, 2, 1)],
)
def test_scale(interpret: Interpret, dtype: torch.dtype, rows: int, logits: int, parts: int) -> None:
    interpret(CHECKS, "scale", dtype, rows, logits, parts)
