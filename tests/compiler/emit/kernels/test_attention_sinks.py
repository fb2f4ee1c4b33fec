"""The gradient of attention sinks against its op in Triton's interpreter. The checks: checks_attention_sinks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

SIZES = [
    (2, 37, 2, 3, 10),  # B, S, kv heads, query heads per kv head, columns: no powers of two
    (1, 300, 1, 1, 64),
    (3, 5, 8, 8, 64),
    (1, 70, 20, 2, 256),  # more heads than a program has
    (0, 5, 2, 2, 8),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradient(interpret: Callable[..., Any], dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    interpret("tests.compiler.emit.kernels.checks_attention_sinks", "gradient", dtype, sizes)
