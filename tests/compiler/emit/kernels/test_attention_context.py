"""Attention of context ranks, against its reference ops. The checks are in checks_attention_context.py.

Blocks are of 128 queries and 64 keys in the forward, in the backward of 128 queries or 128 keys; in FP32 of 16 or 32.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.emit.kernels import emit_kernel
from compiler.ir import Buffer
from runtime.contract.zigzag import rows_of_rank
from tests.compiler.emit.kernels.gate_launch import load

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_attention_context"
BF16, FP32 = torch.bfloat16, torch.float32

dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
# Context ranks, rank, lengths of documents.
RANKS = [(2, 0, ()), (2, 1, (3, 30)), (4, 0, (1,) * 20), (4, 3, ())]


@dtypes
@pytest.mark.parametrize("where", RANKS)
def test_mla(interpret: Interpret, dtype: torch.dtype, where: tuple[Any, ...]) -> None:
    interpret(CHECKS, "on_rank", "mla", dtype, (2, 40, 2, 10, 6, 5), *where)


@dtypes
@pytest.mark.parametrize("where", RANKS)
def test_gqa(interpret: Interpret, dtype: torch.dtype, where: tuple[Any, ...]) -> None:
    interpret(CHECKS, "on_rank", "gqa", dtype, (2, 40, 1, 2, 10), *where)


# Sequence, context ranks, rank, lengths of documents: chunks that blocks divide, and blocks of rows of both chunks.
IN_BLOCKS = [
    (512, 2, 0, ()),
    (512, 2, 1, (127, 130, 200)),
    (600, 2, 0, (5, 250)),
    (600, 2, 1, ()),
    (600, 4, 2, (63, 2, 126, 2)),
]


@pytest.mark.parametrize(("sequence", "context", "rank", "lengths"), IN_BLOCKS)
@pytest.mark.parametrize("op", ["mla", "gqa"])
def test_several_blocks(
    interpret: Interpret, op: str, sequence: int, context: int, rank: int, lengths: tuple[int, ...]
) -> None:
    sizes = (1, sequence, 1, 24, 16, 40) if op == "mla" else (1, sequence, 1, 2, 32)
    interpret(CHECKS, "on_rank", op, BF16, sizes, context, rank, lengths)


# Sizes, context ranks, rank, lengths of documents, window, softcap, whether there are sinks.
BOUNDED = [
    ((2, 40, 1, 2, 10), 2, 0, (), 5, 0.0, False),
    ((1, 40, 2, 3, 10), 2, 1, (3, 10, 1, 16), 1, 0.0, True),
    ((1, 40, 2, 3, 10), 4, 3, (), 0, 0.0, True),
    ((1, 40, 2, 1, 10), 4, 0, (16, 17), 0, 3.0, False),
    ((2, 24, 2, 2, 10), 2, 1, (8, 3), 7, 3.0, True),
    ((2, 8, 1, 3, 2), 4, 1, (), 4, 3.0, True),  # chunks of one row
]
BOUNDED_IN_BLOCKS = [
    ((1, 600, 1, 2, 64), 2, 0, (128, 64, 60), 100, 5.0, True),
    ((1, 600, 1, 1, 32), 2, 0, (), 20, 0.0, False),  # a block with rows further apart than the window
    ((1, 512, 1, 1, 32), 2, 1, (127, 200), 130, 0.0, False),
    ((1, 1024, 1, 1, 128), 4, 1, (), 64, 0.0, True),  # whole blocks, separate kernels for dk and dv
    ((1, 280, 1, 2, 256), 2, 1, (60, 30), 70, 20.0, True),  # Gemma 2's widest heads
]


@dtypes
@pytest.mark.parametrize("case", BOUNDED)
def test_bounded(interpret: Interpret, dtype: torch.dtype, case: tuple[Any, ...]) -> None:
    interpret(CHECKS, "on_rank", "bounded", dtype, *case)


@pytest.mark.parametrize("case", BOUNDED_IN_BLOCKS)
def test_bounded_in_several_blocks(interpret: Interpret, case: tuple[Any, ...]) -> None:
    interpret(CHECKS, "on_rank", "bounded", BF16, *case)


def test_whole_blocks_of_v3(interpret: Interpret) -> None:
    """DeepSeek-V3's widths, with separate kernels for dk and dv."""
    interpret(CHECKS, "on_rank", "mla", BF16, (1, 512, 1, 128, 64, 128), 2, 1, (100, 30))


@pytest.mark.parametrize("seed", range(2))
def test_random_rows(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "random_rows", seed)


@pytest.mark.parametrize(("op", "sizes"), [("mla", (1, 40, 2, 10, 6, 5)), ("gqa", (1, 40, 1, 2, 10))])
def test_a_wrong_position_shows(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "a_wrong_position_shows", op, sizes)


MANY = [("mla", (2, 200, 1, 16, 8, 16)), ("gqa", (2, 200, 1, 2, 16))]


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_whole_sequences_equal_attention_of_one_rank(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "whole_sequences_are_one_rank", op, sizes, (50, 70, 3))


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_bits_are_equal(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "bits_are_equal", op, sizes, (50, 70, 3))


@pytest.mark.parametrize(("context", "rank"), [(2, 0), (4, 3)])
def test_moves_only_the_bytes_that_ranks_need(interpret: Interpret, context: int, rank: int) -> None:
    interpret(CHECKS, "moves_what_ranks_need", context, rank)


def test_moves_only_the_bytes_that_windows_need(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_what_windows_need")


# ---------------------------------------------------------------- emitted text


def mla_arguments(S: int, context: int, H: int, *places: Buffer | None) -> tuple[Any, ...]:
    q, kv = Buffer("q", (S // context, H * 192), "bfloat16"), Buffer("kv", (S, H * 256), "bfloat16")
    return q, kv, Buffer("k_rope", (S, 64), "bfloat16"), S, H, 128, 64, 128, 0.0, *places


def test_documents_do_not_change_the_kernel_text() -> None:
    """Document starts and positions are data. A different number of queries gives a different text."""
    rows = Buffer("rows", (1024,), "int32")
    with_them, without = (emit_kernel("mla_attention", mla_arguments(4096, 4, 2, x, rows), 132) for x in (rows, None))
    few_queries, all_queries = (
        emit_kernel("mla_attention", mla_arguments(4096, *options), 132) for options in ((8, 2, None, rows), (1, 2))
    )
    assert with_them == without
    assert (
        with_them
        and few_queries
        and all_queries
        and len({file.name for file in (with_them, few_queries, all_queries)}) == 3
    )


@pytest.mark.parametrize("context", [2, 16])
@pytest.mark.parametrize("rising", [True, False])
def test_queues(tmp_path: Path, rising: bool, context: int) -> None:
    """Every tile has one ticket, and whichever rank runs them, programs are done at nearly the same time."""
    S, H, rows = 32768, 128, Buffer("rows", (32768 // context,), "int32")
    file = emit_kernel("mla_attention", mla_arguments(S, context, H, None, rows), 132)
    assert file
    module = load(file, tmp_path)
    tiles, starts = (x.tolist() for x in module._legs(H, 128, rising, module.BAND, torch.device("cpu")))
    blocks = (S // context if rising else S) // 128
    assert sorted(tiles) == list(range(H * blocks))
    for rank in (0, context - 1):
        positions = rows_of_rank(torch.arange(S), 1, context, rank)
        if rising:  # blocks of keys up to the last row
            lengths = [int(last) // 128 + 1 for last in positions[127::128]]
        else:  # blocks of queries from the first that sees a key
            lengths = [int((positions >= first).sum()) // 128 for first in range(0, S, 128)]
        legs = [sum(2 * lengths[tile % blocks] + 1 for tile in tiles[a:b]) for a, b in pairwise(starts)]
        busy = [sum(legs[lane::132]) for lane in range(132)]
        assert max(busy) * 132 <= 1.04 * sum(busy)
