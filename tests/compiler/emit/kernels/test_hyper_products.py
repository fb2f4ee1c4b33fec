"""The products of normed residual streams against their ops in Triton's interpreter. The checks:
checks_hyper_products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_hyper_products"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@each_dtype
@pytest.mark.parametrize("check", ["products", "gradients"])
@pytest.mark.parametrize(("rows", "logits"), [(0, 24), (1, 4), (70, 24), (65, 15), (3, 2), (33, 50)])
@pytest.mark.parametrize("columns", [8, 33, 132])
def test_products(interpret: Interpret, check: str, dtype: torch.dtype, rows: int, logits: int, columns: int) -> None:
    interpret(CHECKS, check, dtype, rows, logits, columns)


@each_dtype
@pytest.mark.parametrize(("check", "columns"), [("products", 4100), ("gradients", 1060)])
def test_several_programs_for_a_row(interpret: Interpret, check: str, dtype: torch.dtype, columns: int) -> None:
    interpret(CHECKS, check, dtype, 35, 24, columns)


@each_dtype
def test_a_second_run_gives_the_same_bits(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "repeats", dtype)


@pytest.mark.parametrize("name", ["reads_the_streams_once", "keeps_small_numbers"])
def test_bf16(interpret: Interpret, name: str) -> None:
    interpret(CHECKS, name)


@pytest.mark.parametrize(
    ("rows", "dtype", "of_fn"),
    [
        (65, "bfloat16", "bfloat16"),
        (65, "float32", "float32"),
        (24, "bfloat16", "float32"),
        (24, "float64", "float64"),
    ],
)
def test_what_the_kernels_do_not_take(rows: int, dtype: str, of_fn: str) -> None:
    assert (
        emit_kernel("hyper_products", (Buffer("h", ("R", 64), dtype), Buffer("fn", (rows, 64), of_fn), 1e-6), 4) is None
    )
