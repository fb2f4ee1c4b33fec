"""The kernels that copy rows into residual streams against their ops in Triton's interpreter. The checks:
checks_hyper_copy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_hyper_copy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("rows", "streams", "columns"), [(0, 4, 33), (1, 1, 4), (9, 4, 33), (13, 3, 96), (3, 4, 2500), (5, 8, 600)]
)
def test_copy(interpret: Interpret, dtype: torch.dtype, rows: int, streams: int, columns: int) -> None:
    interpret(CHECKS, "copy", dtype, rows, streams, columns)


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")
