"""The kernels of short convolutions against their ops in Triton's interpreter. The checks: checks_convolve.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer
from tests.compiler.emit.kernels.gate import SM_90, SM_100, Gate, Target

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_convolve"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize(
    ("rows", "sequence", "columns", "taps"),
    [(0, 5, 7, 4), (2, 1, 4, 4), (14, 7, 33, 4), (36, 36, 1030, 3)],
)
def test_convolve(
    interpret: Interpret, dtype: torch.dtype, documents: bool, rows: int, sequence: int, columns: int, taps: int
) -> None:
    interpret(CHECKS, "convolve", dtype, rows, sequence, columns, taps, documents)


def test_several_programs_for_a_column(interpret: Interpret) -> None:
    interpret(CHECKS, "convolve", torch.float32, 134, 67, 40, 4, True)


def test_few_bytes_are_moved_twice(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_few_bytes_twice")


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_passes_the_gate(dtype: torch.dtype, target: Target) -> None:
    """At the sizes of Qwen3-Next: 8192 columns of queries, keys and values, and 4 taps."""
    x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((4096, 8192), (8192, 4)))
    before, acc = torch.empty(4096, dtype=torch.int32, device="meta"), torch.empty(8192, 4, device="meta")
    name = str(dtype).removeprefix("torch.")
    buffers = Buffer("x", ("R", 8192), name), Buffer("w", (8192, 4), name)
    file = emit_kernel("convolve", (*buffers, 1024), 132)
    assert file
    for op, arguments in (
        ("convolve", (x, w, 1024)),
        ("convolve", (x, w, 1024, before)),
        ("convolve_dgrad", (x, x, w, before)),
        ("convolve_wgrad_", (acc, x, x, w, before)),
    ):
        verdicts = Gate(target).verdicts(file, op, arguments)
        assert verdicts and not any(verdict.failures for verdict in verdicts), verdicts


@pytest.mark.parametrize(("taps", "dtype"), [(1, "bfloat16"), (5, "bfloat16"), (4, "float64")])
def test_what_the_kernels_do_not_take(taps: int, dtype: str) -> None:
    assert emit_kernel("convolve", (Buffer("x", ("R", 64), dtype), Buffer("w", (64, taps), dtype), 8), 132) is None
