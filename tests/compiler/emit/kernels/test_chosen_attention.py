"""Attention over chosen keys against its ops in Triton's interpreter. The checks are in checks_chosen_attention.py.

In BF16, blocks are of 128 queries and 64 keys in the forward and for dq, of 64 queries and 128 keys for dk and dv; in
FP32 of 16 queries and 32 keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer
from tests.compiler.emit.kernels.gate import SM_90, SM_100, Gate, Target
from tests.compiler.emit.kernels.shapes import describe

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_chosen_attention"
BF16, FP32 = torch.bfloat16, torch.float32

dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
SMALL = (2, 37, 3, 10, 6, 5)  # B, S, H, nope, rope, value: no powers of two, rows that are not aligned


@dtypes
@pytest.mark.parametrize("top_k", [2, 5, 37])
def test_small(interpret: Interpret, dtype: torch.dtype, top_k: int) -> None:
    interpret(CHECKS, "attention", dtype, SMALL, top_k)


@dtypes
def test_one_key(interpret: Interpret, dtype: torch.dtype) -> None:
    """Its weight is 1, so queries and keys have no gradient."""
    interpret(CHECKS, "attention", dtype, (2, 9, 3, 10, 6, 5), 1)


@dtypes
def test_one_token(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "attention", dtype, (3, 1, 1, 2, 2, 1), 1)


@dtypes
@pytest.mark.parametrize("context", [(2, 0), (2, 1), (4, 3)])
def test_rows_of_context_ranks(interpret: Interpret, dtype: torch.dtype, context: tuple[int, int]) -> None:
    interpret(CHECKS, "attention", dtype, (2, 40, 2, 10, 6, 5), 7, 0, context)


# Sequence, chosen keys, reach (0: all keys before), context ranks and rank.
IN_BLOCKS = [
    (300, 40, 0, (1, 0)),
    (300, 9, 20, (1, 0)),  # most blocks have nothing that is chosen
    (256, 64, 0, (1, 0)),  # whole blocks
    (600, 70, 0, (2, 1)),
    (512, 33, 50, (2, 0)),
]


@pytest.mark.parametrize(("sequence", "top_k", "reach", "context"), IN_BLOCKS)
def test_several_blocks(interpret: Interpret, sequence: int, top_k: int, reach: int, context: tuple[int, int]) -> None:
    interpret(CHECKS, "attention", BF16, (1, sequence, 1, 24, 16, 40), top_k, reach, context)


def test_several_blocks_in_fp32(interpret: Interpret) -> None:
    interpret(CHECKS, "attention", FP32, (1, 100, 2, 24, 16, 40), 12)


def test_whole_blocks_of_v32(interpret: Interpret) -> None:
    """DeepSeek-V3.2's widths, with separate kernels for dk and dv."""
    interpret(CHECKS, "attention", BF16, (1, 256, 2, 128, 64, 128), 60)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("empty", [slice(0, 3), slice(0, 37), slice(20, 21)])
def test_queries_that_choose_nothing(interpret: Interpret, dtype: torch.dtype, empty: slice) -> None:
    interpret(CHECKS, "nothing_chosen", dtype, SMALL, 5, empty)


def test_a_block_that_chooses_nothing(interpret: Interpret) -> None:
    interpret(CHECKS, "nothing_chosen", BF16, (1, 300, 1, 16, 16, 16), 5, slice(128, 256))


def test_all_keys_are_causal_attention(interpret: Interpret) -> None:
    interpret(CHECKS, "all_chosen_is_causal", SMALL)


@dtypes
def test_bits_are_equal(interpret: Interpret, dtype: torch.dtype) -> None:
    interpret(CHECKS, "bits_are_equal", dtype, (1, 200 if dtype == BF16 else 40, 1, 16, 8, 16), 9)


def test_a_wrong_choice_shows(interpret: Interpret) -> None:
    interpret(CHECKS, "a_wrong_choice_shows", (1, 40, 2, 16, 16, 16), 4)


def test_reads_only_chosen_blocks(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_only_chosen_blocks")


# ---------------------------------------------------------------- machine code


def arguments(op: str, dtype: torch.dtype, S: int, Q: int, top_k: int) -> tuple[Any, ...]:
    """Meta tensors of a rank with 32 heads of DeepSeek-V3.2's widths."""

    def tensor(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    sizes = S, 32, 128, 64, 128
    inputs = tensor(Q, 32 * 192), tensor(S, 32 * 256), tensor(S, 64)
    chosen_TK = tensor(Q, top_k, of=torch.int32)
    if op == "chosen_attention":
        return *inputs, chosen_TK, *sizes
    o, lse = tensor(Q, 32 * 128), tensor(1, 32, Q, of=FP32)
    return o, *inputs, o, lse, chosen_TK, *sizes


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
@pytest.mark.parametrize("op", ["chosen_attention", "chosen_attention_dgrad"])
def test_code_of_v32(op: str, target: Target) -> None:
    """A rank of DeepSeek-V3.2 that has an eighth of a sequence: no launch spills."""
    args = arguments(op, BF16, 131072, 16384, 2048)
    file = emit_kernel(op, describe(args), 132)
    assert file
    for verdict in Gate(target).verdicts(file, op, args):
        assert not verdict.failures, verdict


def test_where_no_kernel_applies() -> None:
    """FP64, wider heads, and keys without a part that is not rotated."""

    def kernel(dtype: str, nope: int, rope: int, value: int) -> Any:
        q, kv, k_rope = (Buffer("x", (64, width), dtype) for width in (2 * (nope + rope), 2 * (nope + value), rope))
        return emit_kernel(
            "chosen_attention", (q, kv, k_rope, Buffer("chosen", (64, 8), "int32"), 64, 2, nope, rope, value), 132
        )

    assert kernel("bfloat16", 128, 64, 128)
    for options in (("float64", 128, 64, 128), ("bfloat16", 128, 128, 128), ("bfloat16", 0, 64, 128)):
        assert kernel(*options) is None
