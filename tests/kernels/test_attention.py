"""The attention kernels against their reference ops in Triton's interpreter. The checks are in checks_attention.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.ir import Buffer
from compiler.kernels import emit_kernel
from compiler.kernels.gate_launch import load
from compiler.kernels.kernel import LEGS

Interpret = Callable[..., Any]
CHECKS = "tests.kernels.checks_attention"

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
BF16 = torch.bfloat16


@dtypes
@pytest.mark.parametrize(
    "sizes",  # B, S, H, nope, rope, value
    [
        (3, 1, 1, 1, 2, 1),
        (2, 37, 3, 10, 6, 5),  # rows at odd addresses
        (2, 64, 2, 32, 16, 32),
        (1, 75, 1, 128, 64, 128),  # one block, not full
    ],
)
def test_mla(interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "mla", dtype, sizes)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 256, 1, 128, 64, 128),  # whole blocks of V3's widths, dk and dv apart
        (2, 300, 2, 24, 16, 40),  # several blocks, the last one not full; widths that are no powers of two
        (1, 200, 9, 10, 6, 5),
    ],
)
def test_mla_in_several_blocks(interpret: Interpret, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "mla", BF16, sizes)


@pytest.mark.parametrize(
    ("sizes", "pow2"),
    [
        ((1, 256, 1, 128, 64, 128), True),  # V3's widths
        ((2, 128, 2, 128, 8, 128), False),
        ((2, 37, 3, 10, 6, 128), True),  # tiles of results, and none of keys and values
    ],
)
def test_mla_in_tiles(interpret: Interpret, sizes: tuple[int, ...], pow2: bool) -> None:
    interpret(CHECKS, "in_tiles", sizes, pow2, False)


def test_mla_of_zeros_infinities_and_nan_in_tiles(interpret: Interpret) -> None:
    interpret(CHECKS, "in_tiles", (1, 128, 3, 128, 16, 128), True, True)


def test_mla_moves_tiles_once(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_tiles_once")


@dtypes
@pytest.mark.parametrize(
    "sizes",  # B, S, kv heads, query heads of each, columns
    [
        (2, 1, 1, 3, 2),
        (2, 37, 2, 3, 10),
        (1, 64, 1, 4, 64),
    ],
)
def test_gqa(interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "gqa", dtype, sizes)


@pytest.mark.parametrize("sizes", [(1, 256, 1, 2, 128), (2, 190, 2, 2, 48), (1, 200, 3, 1, 6)])
def test_gqa_in_several_blocks(interpret: Interpret, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "gqa", BF16, sizes)


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "random_sizes", seed)


@pytest.mark.parametrize(("op", "sizes"), [("mla", (0, 5, 2, 8, 4, 8)), ("gqa", (0, 5, 2, 2, 8))])
def test_nothing(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "nothing", op, sizes)


MANY = [("mla", (1, 300, 2, 32, 16, 32)), ("gqa", (1, 300, 2, 2, 32))]
SHORT = [("mla", (3, 20, 2, 16, 8, 16)), ("gqa", (3, 20, 2, 2, 16))]


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_bits_are_equal(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "bits_are_equal", op, BF16, sizes)


def test_bits_of_the_shared_key_are_equal(interpret: Interpret) -> None:
    """The shared key's gradient sums over heads in three steps of 16, unrounded, so the order of the steps shows."""
    interpret(CHECKS, "bits_are_equal", "mla", torch.float32, (1, 7, 35, 16, 8, 16))


@dtypes
@pytest.mark.parametrize(("op", "sizes"), SHORT)
def test_sequences_are_apart(interpret: Interpret, dtype: torch.dtype, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "sequences_are_apart", op, dtype, sizes)


def test_moves_what_tiles_need(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_what_tiles_need")


# ---------------------------------------------------------------- what is emitted


def mla_arguments(S: int, H: int, nope: int, rope: int, value: int, dtype: str = "bfloat16") -> tuple[Any, ...]:
    q, kv = Buffer("q", ("R", H * (nope + rope)), dtype), Buffer("kv", ("R", H * (nope + value)), dtype)
    return q, kv, Buffer("k_rope", ("R", rope), dtype), S, H, nope, rope, value, 1e4


@pytest.mark.parametrize(
    "arguments",
    [
        mla_arguments(128, 4, 32, 16, 32, "float64"),
        mla_arguments(128, 4, 129, 16, 32),  # wider than any model's: the sums would not fit in the registers
        mla_arguments(128, 4, 128, 128, 128),
        mla_arguments(128, 4, 32, 16, 256),
        (Buffer("q", ("R", 64), "float32"), *mla_arguments(128, 1, 32, 32, 32)[1:]),  # of two dtypes
    ],
)
def test_where_no_kernel_applies(arguments: tuple[Any, ...]) -> None:
    assert emit_kernel("mla_attention", arguments, 132) is None


@pytest.mark.parametrize(
    ("op", "sizes"),
    [
        ("mla_attention_quantise_kept_e5m6", (256, 4, 128, 64, 64)),  # two heads share a tile
        ("mla_attention_quantise_kept_e5m6", (256, 4, 128, 64, 128, "float32")),
        ("mla_attention_dgrad_quantise_both", (250, 4, 128, 64, 128)),  # tiles with rows of two sequences
        ("mla_attention_dgrad_quantise_both", (256, 4, 64, 64, 128)),  # tiles of keys and of values
    ],
)
def test_where_no_kernel_makes_tiles(op: str, sizes: tuple[Any, ...]) -> None:
    q, kv, k_rope, *rest = mla_arguments(*sizes)
    o, lse = Buffer("o", ("R", 4 * sizes[4]), q.dtype), Buffer("lse", (1, 4, sizes[0]), "float32")
    arguments = (o, q, kv, k_rope, o, lse, *rest) if "_dgrad" in op else (q, kv, k_rope, *rest)
    assert emit_kernel(op, arguments, 132) is None


@pytest.mark.parametrize("sms", [132, 112])
@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize(("heads", "waiting"), [(128, 0.004), (16, 0.04)])
def test_queues(tmp_path: Path, sms: int, rising: bool, heads: int, waiting: float) -> None:
    """Every tile has one ticket, and with an SM each the programs are done at nearly the same time."""
    file = emit_kernel("mla_attention", mla_arguments(4096, heads, 128, 64, 128), sms)
    assert file
    module = load(file, tmp_path)
    tiles, starts = (x.tolist() for x in module._legs(heads, 128, rising, module.BAND, torch.device("cpu")))
    assert sorted(tiles) == list(range(heads * 32)) and len(starts) == LEGS * sms + 1
    lengths = [tile % 32 + 1 if rising else 32 - tile % 32 for tile in tiles]
    legs = [sum(2 * length + 1 for length in lengths[a:b]) for a, b in pairwise(starts)]
    busy = [sum(legs[lane::sms]) for lane in range(sms)]
    assert max(busy) * sms <= (1 + waiting) * sum(busy)
