"""Every emitted kernel against its reference op, in Triton's interpreter. The checks are in interpreted.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.kernels.interpreted"
FAULTS = "tests.kernels.faulty"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize(("rows", "columns"), [(0, 33), (1, 1), (7, 33), (45, 192), (5, 1100)])
def test_rmsnorm(interpret: Interpret, dtype: torch.dtype, rows: int, columns: int) -> None:
    interpret(CHECKS, "rmsnorm", dtype, rows, columns)


@dtypes
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("rows", "inner"), [(0, 33), (1, 4), (7, 33), (45, 192), (5, 2500)])
def test_swiglu(interpret: Interpret, dtype: torch.dtype, rows: int, inner: int, gated: bool) -> None:
    interpret(CHECKS, "swiglu", dtype, rows, inner, gated)


@dtypes
@pytest.mark.parametrize(
    ("out", "inner", "experts", "sizes"),
    [
        (8, 16, 2, (0, 0)),  # no rows at all
        (40, 24, 5, (1, 1, 1, 1, 1)),  # one source
        (70, 33, 3, (3, 0, 50, 1, 7, 0)),  # two sources, empty groups, rows at odd addresses
        (136, 72, 2, (0, 130, 5, 140, 70, 0)),  # three sources; an expert's rows fill several tiles
        (264, 320, 1, (40, 0, 100)),  # several tiles either way, the last ones partly filled
        (24, 40, 3, (0, 2100, 0)),  # all rows to one expert, in more tiles than a band is high and programs run
    ],
)
def test_grouped_linear(
    interpret: Interpret, dtype: torch.dtype, out: int, inner: int, experts: int, sizes: tuple[int, ...]
) -> None:
    interpret(CHECKS, "grouped_linear", dtype, out, inner, experts, sizes)


@pytest.mark.parametrize("seed", range(6))
def test_grouped_linear_of_random_sizes(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "grouped_linear_of_random_sizes", seed)


@dtypes
def test_nan_stays_where_it_is(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "grouped_linear_with_nan", dtype)


@dtypes
def test_the_benchmark(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "benchmark", dtype)


@pytest.mark.parametrize("name", ["bf16_casts", "bf16_arithmetic", "bf16_products"])
def test_the_interpreter_rounds(interpret: Interpret, name: str) -> None:
    interpret(FAULTS, name)


@pytest.mark.parametrize("name", ["two_writers", "writer_and_reader", "outside"])
def test_the_watch_finds(interpret: Interpret, name: str) -> None:
    interpret(FAULTS, name)
