"""The kernels that choose keys against their op, in Triton's interpreter. Checks: checks_select_keys.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_select_keys"

SIZES = [  # B, S, heads, columns, K, rate
    (1, 33, 3, 20, 5, 1),  # two tiles, and columns that are no power of two
    (2, 29, 2, 16, 4, 4),  # seven keys of each sequence, which do not cover it
    (1, 12, 1, 8, 30, 1),  # fewer keys than may be chosen
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
spans = pytest.mark.parametrize(("documents", "some"), [(False, False), (True, False), (False, True), (True, True)])


@dtypes
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_integers_choose_the_keys_of_the_op(interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "exact", dtype, sizes, False, False)


@spans
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_documents_and_positions(interpret: Interpret, sizes: tuple[int, ...], documents: bool, some: bool) -> None:
    interpret(CHECKS, "exact", torch.float32, sizes, documents, some)


@dtypes
def test_many_keys(interpret: Interpret, dtype: torch.dtype) -> None:
    """Several blocks of keys of the first launch and of the second, and more chosen keys than a block of the second."""
    interpret(CHECKS, "long", dtype)


@dtypes
@pytest.mark.parametrize(("documents", "some"), [(False, False), (True, True)])
def test_numbers_choose_the_best_within_rounding(
    interpret: Interpret, dtype: torch.dtype, documents: bool, some: bool
) -> None:
    interpret(CHECKS, "near", dtype, SIZES[0], documents, some)


def test_scores_of_any_kind(interpret: Interpret) -> None:
    interpret(CHECKS, "any_number")


def test_batches_change_nothing(interpret: Interpret) -> None:
    interpret(CHECKS, "in_batches")
