"""The kernels of an indexer's loss against their op, in Triton's interpreter. Checks: checks_indexer_loss.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_indexer_loss"

SIZES = [  # B, S, heads and columns of the indexer; heads, nope, rope of attention; K, rate
    (1, 37, 3, 20, 2, 12, 6, 5, 1),  # no powers of two
    (2, 36, 2, 16, 3, 8, 8, 0, 1),  # all keys
    (2, 31, 4, 16, 2, 0, 24, 3, 4),  # keys that stand for four tokens
    (1, 70, 1, 16, 1, 0, 256, 9, 1),  # several blocks of keys, and of columns
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_loss(interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "loss", dtype, sizes)


@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)
@pytest.mark.parametrize(("documents", "some"), [(True, False), (False, True), (True, True)])
def test_documents_and_positions(interpret: Interpret, sizes: tuple[int, ...], documents: bool, some: bool) -> None:
    interpret(CHECKS, "loss", torch.float32, sizes, documents, some)


@dtypes
def test_gradients_times_that_of_the_loss(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "scaled", dtype)
