"""Attention with separate documents in a sequence, against its reference ops. The checks are in checks_attention.py.

Blocks are of 128 queries and 64 keys in the forward, in the backward of 128 queries or 128 keys; in FP32 of 16 or 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_attention"
BF16, FP32 = torch.bfloat16, torch.float32

dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
# Lengths of documents in a sequence of 300: they begin at, before and after the edge of a block, and inside one.
BORDERS = [(300,), (1,) * 100, (128, 64, 60), (127, 2, 62, 3), (63, 2, 126, 2), (5, 250), (256,)]


@dtypes
@pytest.mark.parametrize("lengths", [(1,), (37,), (1,) * 20, (16, 1, 15), (15, 2, 16), (33,)])
def test_mla(interpret: Interpret, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    interpret(CHECKS, "mla", dtype, (2, 37, 3, 10, 6, 5), lengths)


@pytest.mark.parametrize("lengths", BORDERS)
def test_mla_in_several_blocks(interpret: Interpret, lengths: tuple[int, ...]) -> None:
    interpret(CHECKS, "mla", BF16, (1, 300, 1, 24, 16, 40), lengths)


@dtypes
@pytest.mark.parametrize("lengths", [(1,), (1,) * 20, (16, 1, 15), (15, 2, 16)])
def test_gqa(interpret: Interpret, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    interpret(CHECKS, "gqa", dtype, (2, 37, 2, 3, 10), lengths)


@pytest.mark.parametrize("lengths", BORDERS)
def test_gqa_in_several_blocks(interpret: Interpret, lengths: tuple[int, ...]) -> None:
    interpret(CHECKS, "gqa", BF16, (1, 300, 1, 2, 32), lengths)


@dtypes
@pytest.mark.parametrize(("op", "sizes"), [("mla", (1, 30, 1, 16, 16, 32)), ("gqa", (1, 30, 1, 1, 32))])
def test_every_token_its_own_document(
    interpret: Interpret, dtype: torch.dtype, op: str, sizes: tuple[int, ...]
) -> None:
    """Every weight is 1, so queries and keys have no gradient."""
    interpret(CHECKS, op, dtype, sizes, (1,) * 30)


@pytest.mark.parametrize("op", ["mla", "gqa"])
def test_one_token(interpret: Interpret, op: str) -> None:
    interpret(CHECKS, op, BF16, (3, 1, 1, 2, 2, 1) if op == "mla" else (3, 1, 1, 2, 2), (1,))


def test_whole_blocks_of_v3(interpret: Interpret) -> None:
    """Whole blocks of DeepSeek-V3's widths, with separate kernels for dk and dv."""
    interpret(CHECKS, "mla", BF16, (1, 256, 1, 128, 64, 128), (100, 30))


# Sizes, window, softcap, whether there are sinks, lengths of documents.
BOUNDED = [
    ((2, 37, 2, 3, 10), 5, 0.0, False, (3, 10, 1, 16)),
    ((2, 37, 2, 3, 10), 1, 0.0, True, (3, 10, 1, 16)),
    ((1, 37, 2, 3, 10), 0, 0.0, True, (1,) * 37),  # each query sees its own key and the sink
    ((1, 37, 2, 1, 10), 0, 3.0, False, (16, 17)),
    ((2, 21, 2, 2, 10), 7, 3.0, True, (8, 3)),
    ((2, 1, 1, 3, 2), 4, 3.0, True, (1,)),
]
IN_BLOCKS = [
    ((1, 300, 1, 2, 64), 100, 5.0, True, (128, 64, 60)),
    ((1, 420, 1, 1, 32), 130, 0.0, False, (127, 200)),  # documents within windows, and windows within documents
    ((2, 300, 1, 1, 32), 129, 0.0, True, (64, 129)),
    ((1, 256, 1, 1, 128), 64, 0.0, False, (40, 128)),
    ((1, 150, 1, 1, 32), 300, 8.0, True, (149,)),
    ((1, 140, 1, 2, 256), 70, 20.0, True, (60, 30)),
]


@dtypes
@pytest.mark.parametrize("bounds", BOUNDED)
def test_bounded(interpret: Interpret, dtype: torch.dtype, bounds: tuple[Any, ...]) -> None:
    interpret(CHECKS, "bounded", dtype, *bounds)


@pytest.mark.parametrize("bounds", IN_BLOCKS)
def test_bounded_in_several_blocks(interpret: Interpret, bounds: tuple[Any, ...]) -> None:
    interpret(CHECKS, "bounded", BF16, *bounds)


@pytest.mark.parametrize("seed", range(2))
def test_random_documents(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "random_documents", seed)


MANY = [("mla", (2, 150, 1, 16, 8, 16)), ("gqa", (2, 150, 1, 2, 16))]


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_one_document_equals_attention_without_documents(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "one_document_is_none", op, BF16, sizes)


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_bits_are_equal(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "bits_are_equal", op, BF16, sizes, (50, 70, 3))


def test_moves_only_the_bytes_that_documents_need(interpret: Interpret) -> None:
    interpret("tests.compiler.emit.kernels.checks_attention_documents", "moves_what_documents_need")
