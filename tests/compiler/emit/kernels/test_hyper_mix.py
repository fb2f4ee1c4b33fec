"""The kernels that mix residual streams against their ops in Triton's interpreter. The checks: checks_hyper_mix.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_hyper_mix"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@each_dtype
@pytest.mark.parametrize(
    ("rows", "streams", "columns", "rounds", "eps"),
    [
        (0, 4, 33, 20, 1e-6),
        (1, 2, 4, 1, 1e-6),
        (9, 4, 33, 20, 1e-6),
        (13, 3, 96, 5, 1e-2),
        (3, 4, 2500, 3, 0.0),
        (5, 8, 600, 4, 1e-6),
        (7, 5, 17, 2, 1e-3),
    ],
)
def test_mix(
    interpret: Interpret, dtype: torch.dtype, rows: int, streams: int, columns: int, rounds: int, eps: float
) -> None:
    interpret(CHECKS, "mix", dtype, rows, streams, columns, rounds, eps)


@each_dtype
@pytest.mark.parametrize(("rows", "streams", "columns"), [(0, 4, 33), (9, 4, 33), (13, 3, 96), (3, 4, 2500), (5, 1, 7)])
def test_collapse(interpret: Interpret, dtype: torch.dtype, rows: int, streams: int, columns: int) -> None:
    interpret(CHECKS, "collapse", dtype, rows, streams, columns)


@each_dtype
def test_a_second_run_gives_the_same_bits(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "repeats", dtype)


def test_each_byte_is_moved_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_each_byte_once")


@pytest.mark.parametrize(("streams", "rounds", "dtype"), [(9, 20, "bfloat16"), (4, 33, "bfloat16"), (4, 20, "float64")])
def test_what_the_kernels_do_not_take(streams: int, rounds: int, dtype: str) -> None:
    h = Buffer("h", ("R", 64 * streams), dtype)
    logits = Buffer("logits", ("R", streams * streams + 2 * streams), "float32")
    assert emit_kernel("hyper_mix", (h, logits, rounds, 1e-6), 132) is None
