"""The kernels that move rows, against their reference ops in Triton's interpreter. Checks are in checks_permute.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_permute"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dtypes
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "columns"),
    [(0, 4, 2, 8), (1, 3, 1, 5), (45, 12, 3, 33), (100, 256, 8, 40), (40, 20, 6, 521), (5, 300, 16, 1024)],
)
def test_permute(interpret: Interpret, dtype: torch.dtype, tokens: int, experts: int, k: int, columns: int) -> None:
    interpret(CHECKS, "permute", dtype, tokens, experts, k, columns)


def test_blocks_grow_with_tokens(interpret: Interpret) -> None:
    interpret(CHECKS, "permute", torch.float32, 200, 6, 3, 8, 2)


def test_all_choices_may_name_one_expert(interpret: Interpret) -> None:
    interpret(CHECKS, "one_expert", 45, 6)


@dtypes
@pytest.mark.parametrize("by_slots", [False, True], ids=["", "placed"])
@pytest.mark.parametrize(
    ("tokens", "experts", "softmax", "groups", "top_groups", "k"),
    [(0, 8, False, 1, 1, 2), (45, 24, False, 6, 3, 5), (40, 256, False, 8, 4, 8), (37, 20, True, 1, 1, 3)],
)
def test_route_permute(
    interpret: Interpret,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    softmax: bool,
    groups: int,
    top_groups: int,
    k: int,
    by_slots: bool,
) -> None:
    interpret(CHECKS, "route_permute", dtype, tokens, experts, softmax, groups, top_groups, k, by_slots)


@dtypes
@pytest.mark.parametrize(("tokens", "k", "columns"), [(0, 2, 8), (1, 1, 5), (45, 3, 33), (21, 8, 1024), (6, 6, 2100)])
def test_back(interpret: Interpret, dtype: torch.dtype, tokens: int, k: int, columns: int) -> None:
    interpret(CHECKS, "back", dtype, tokens, k, columns)


@pytest.mark.parametrize(("tokens", "experts", "k", "columns"), [(0, 4, 2, 128), (45, 12, 3, 200), (37, 64, 8, 1152)])
def test_eight_bits(interpret: Interpret, tokens: int, experts: int, k: int, columns: int) -> None:
    interpret(CHECKS, "eight_bits", tokens, experts, k, columns)


@dtypes
@pytest.mark.parametrize(
    ("tokens", "vocab", "columns"), [(0, 5, 8), (1, 1, 1), (45, 300, 33), (60, 4, 40), (20, 7, 1030)]
)
def test_embedding(interpret: Interpret, dtype: torch.dtype, tokens: int, vocab: int, columns: int) -> None:
    interpret(CHECKS, "embedding", dtype, tokens, vocab, columns)
