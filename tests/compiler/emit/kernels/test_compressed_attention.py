"""Attention to a window and to entries against its op in Triton's interpreter: checks_compressed_attention.py.

A tile is a token and 64 of its heads in BF16, 16 in FP32; blocks have 32 keys or entries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from tests.compiler.emit.kernels.gate import SM_90, SM_100, Gate, Target
from tests.compiler.emit.kernels.shapes import describe

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_compressed_attention"
BF16, FP32 = torch.bfloat16, torch.float32
SMALL = (2, 13, 3, 10, 4, 3)  # B, S, H, C, window, rate: no powers of two, rows that are not aligned

dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize("top_k", [0, 1, 2, 9])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_small(interpret: Interpret, dtype: torch.dtype, top_k: int, sinks: bool) -> None:
    interpret(CHECKS, "attention", dtype, SMALL, top_k, sinks)


# Sizes and chosen entries: several blocks of keys and entries, windows longer than a sequence, sequences without entry.
SIZES = [
    ((1, 90, 2, 16, 70, 2), 40),
    ((1, 90, 2, 16, 33, 2), 0),
    ((1, 64, 4, 32, 32, 4), 8),
    ((2, 20, 1, 8, 100, 1), 5),
    ((1, 5, 2, 8, 3, 7), 0),
    ((1, 5, 2, 8, 3, 7), 2),
    ((3, 1, 2, 8, 1, 1), 1),
]


@dtypes
@pytest.mark.parametrize(("sizes", "top_k"), SIZES)
def test_sizes(interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...], top_k: int) -> None:
    interpret(CHECKS, "attention", dtype, sizes, top_k, True)


def test_more_heads_than_a_tile(interpret: Interpret) -> None:
    interpret(CHECKS, "attention", BF16, (1, 9, 70, 16, 4, 2), 3, True)


def test_widths_of_v4(interpret: Interpret) -> None:
    interpret(CHECKS, "attention", BF16, (1, 15, 64, 512, 7, 4), 2, True)


@dtypes
def test_columns_of_wider_tensors(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "attention", dtype, SMALL, 2, True, True)


@dtypes
def test_bits_are_equal(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "bits_are_equal", dtype, SMALL, 2)


def test_sinks_of_nothing(interpret: Interpret) -> None:
    interpret(CHECKS, "sinks_of_nothing", SMALL)


def test_a_wrong_entry_shows(interpret: Interpret) -> None:
    interpret(CHECKS, "a_wrong_entry_shows", (1, 13, 2, 16, 4, 2))


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
@pytest.mark.parametrize(("rate", "top_k"), [(4, 512), (128, 0)], ids=["csa", "hca"])
def test_code_of_v4(target: Target, rate: int, top_k: int) -> None:
    """DeepSeek-V4-Flash at 4096 tokens: no launch spills."""
    S, H, C = 4096, 64, 512
    q, kv, entries, sinks = (
        torch.empty(shape, dtype=BF16, device="meta") for shape in ((S, H * C), (S, C), (S // rate, C), (H,))
    )
    chosen = torch.empty(S, top_k, dtype=torch.int32, device="meta") if top_k else None
    options = S, H, 128, rate
    lse = torch.empty(1, 1, S, H, dtype=torch.float32, device="meta")
    for op, args in (
        ("compressed_attention", (q, kv, entries, chosen, sinks, *options)),
        ("compressed_attention_dgrad", (q, q, kv, entries, chosen, q, lse, *options)),
    ):
        file = emit_kernel(op, describe(args), 132)
        assert file
        for verdict in Gate(target).verdicts(file, op, args):
            assert not verdict.failures, verdict


def test_where_no_kernel_applies() -> None:
    """FP64, and wider heads."""

    def kernel(dtype: torch.dtype, C: int) -> Any:
        q, kv, entries = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((64, 2 * C), (64, C), (16, C)))
        return emit_kernel("compressed_attention", describe((q, kv, entries, None, None, 64, 2, 8, 4)), 132)

    assert kernel(BF16, 512) and kernel(FP32, 64)
    for options in ((torch.float64, 64), (BF16, 600), (FP32, 128)):
        assert kernel(*options) is None
