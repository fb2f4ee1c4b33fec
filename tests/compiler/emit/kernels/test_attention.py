"""The attention kernels against their reference ops in Triton's interpreter. The checks are in checks_attention.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.emit.kernels import attention, emit_kernel
from compiler.emit.kernels.kernel import LEGS
from compiler.ir import Buffer
from tests.compiler.emit.kernels.gate_launch import load

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_attention"

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
        (1, 256, 1, 128, 64, 128),  # whole blocks of V3's widths, separate kernels for dk and dv
        (2, 300, 2, 24, 16, 40),  # several blocks, the last one partial; widths that are not powers of two
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


# B, S, kv heads, query heads per kv head, columns; window, softcap, whether there are sinks.
BOUNDED = [
    ((2, 37, 2, 3, 10), 5, 0.0, False),
    ((2, 37, 2, 3, 10), 1, 0.0, True),  # each query sees its own key and the sink
    ((1, 37, 2, 3, 10), 0, 0.0, True),
    ((1, 37, 2, 1, 10), 0, 3.0, False),
    ((2, 21, 2, 2, 10), 7, 3.0, True),
    ((2, 1, 1, 3, 2), 4, 3.0, True),  # one token; a window that is wider than the sequence
]
# Several blocks in the smallest sizes: what windows leave out, part of, and see whole.
IN_BLOCKS = [
    ((1, 300, 1, 2, 64), 100, 5.0, True),
    ((1, 420, 1, 1, 32), 130, 0.0, False),
    ((1, 300, 1, 1, 32), 100, 50.0, False),  # rows that see no key of their first block, and no sink
    ((1, 300, 1, 1, 32), 129, 0.0, True),
    ((1, 300, 1, 1, 32), 1, 0.0, True),
    ((1, 30, 1, 1, 32), 1, 0.0, False),  # every weight is 1, so queries and keys have no gradient
    ((1, 256, 1, 1, 128), 64, 0.0, False),  # whole blocks, separate kernels for dk and dv
    ((1, 150, 1, 1, 32), 300, 8.0, True),
    ((1, 140, 1, 2, 256), 70, 20.0, True),  # Gemma 2's widest heads
]


@dtypes
@pytest.mark.parametrize(("sizes", "window", "softcap", "sinks"), BOUNDED)
def test_bounded(
    interpret: Interpret, dtype: torch.dtype, sizes: tuple[int, ...], window: int, softcap: float, sinks: bool
) -> None:
    interpret(CHECKS, "bounded", dtype, sizes, window, softcap, sinks)


@pytest.mark.parametrize(("sizes", "window", "softcap", "sinks"), IN_BLOCKS)
def test_bounded_in_several_blocks(
    interpret: Interpret, sizes: tuple[int, ...], window: int, softcap: float, sinks: bool
) -> None:
    interpret(CHECKS, "bounded", BF16, sizes, window, softcap, sinks)


def test_gqa_of_wide_heads(interpret: Interpret) -> None:
    interpret(CHECKS, "gqa", BF16, (1, 70, 1, 1, 256))


@pytest.mark.parametrize("window", [0, 9])
def test_a_sink_of_minus_infinity_has_no_effect(interpret: Interpret, window: int) -> None:
    interpret(CHECKS, "sinks_of_nothing", (1, 150, 2, 2, 16), window)


@pytest.mark.parametrize("seed", range(3))
def test_random_bounds(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "random_bounds", seed)


def test_a_window_moves_only_the_tiles_that_it_needs(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_what_windows_need")


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(interpret: Interpret, seed: int) -> None:
    interpret(CHECKS, "random_sizes", seed)


@pytest.mark.parametrize("lengths", [(), (2,)])
@pytest.mark.parametrize(("op", "sizes"), [("mla", (0, 5, 2, 8, 4, 8)), ("gqa", (0, 5, 2, 2, 8))])
def test_nothing(interpret: Interpret, op: str, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    interpret(CHECKS, "nothing", op, sizes, lengths)


MANY = [("mla", (1, 200, 2, 16, 8, 16)), ("gqa", (1, 200, 2, 2, 16))]
SHORT = [("mla", (3, 20, 2, 16, 8, 16)), ("gqa", (3, 20, 2, 2, 16))]


@pytest.mark.parametrize(("op", "sizes"), MANY)
def test_bits_are_equal(interpret: Interpret, op: str, sizes: tuple[int, ...]) -> None:
    interpret(CHECKS, "bits_are_equal", op, BF16, sizes)


def test_bits_of_the_shared_key_are_equal(interpret: Interpret) -> None:
    """The shared key's gradient sums over heads in three steps of 16, unrounded, so the order of the steps shows."""
    interpret(CHECKS, "bits_are_equal", "mla", torch.float32, (1, 7, 35, 16, 8, 16))


@dtypes
@pytest.mark.parametrize(("op", "sizes"), SHORT)
def test_sequences_do_not_affect_each_other(
    interpret: Interpret, dtype: torch.dtype, op: str, sizes: tuple[int, ...]
) -> None:
    interpret(CHECKS, "sequences_are_apart", op, dtype, sizes)


def test_moves_only_the_bytes_of_needed_tiles(interpret: Interpret) -> None:
    interpret(CHECKS, "moves_what_tiles_need")


# ---------------------------------------------------------------- emitted text


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
    q, kv, k_rope, *options = mla_arguments(*sizes)
    o, lse = Buffer("o", ("R", 4 * sizes[4]), q.dtype), Buffer("lse", (1, 4, sizes[0]), "float32")
    arguments = (o, q, kv, k_rope, o, lse, *options) if "_dgrad" in op else (q, kv, k_rope, *options)
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


def bounded_arguments(S: int, H: int, G: int, C: int, window: int, softcap: float, sinks: bool) -> tuple[Any, ...]:
    q, kv = Buffer("q", ("R", H * C), "bfloat16"), Buffer("k", ("R", G * C), "bfloat16")
    return q, kv, kv, Buffer("sinks", (H,), "bfloat16") if sinks else None, S, H, G, 1e4, window, softcap


def test_tiles_of_wide_heads_in_fp32_are_small() -> None:
    """Larger ones spill: `make kernels` compiles them."""

    def tile(width: int, positions: bool) -> tuple[int, int]:
        forward, *_ = attention._launches(256, width, width, "float32", False, False, False, positions)
        return forward["M"], forward["N"]

    assert [tile(width, False) for width in (32, 64, 128)] == [(32, 32), (32, 16), (16, 16)]
    assert [tile(width, True) for width in (32, 64, 128)] == [(32, 32), (32, 32), (16, 16)]


def test_different_bounds_give_different_names() -> None:
    """Files of one build have different names if their texts differ; a window as wide as a sequence has no effect."""
    bounds = [(64, 0.0, False), (65, 0.0, False), (0, 0.0, False), (0, 0.0, True), (64, 2.5, True), (64, 25.0, True)]
    files = [emit_kernel("bounded_attention", bounded_arguments(128, 4, 2, 32, *bound), 132) for bound in bounds]
    assert len({file.name for file in files if file}) == len({file.source for file in files if file}) == len(files)
    assert emit_kernel("bounded_attention", bounded_arguments(128, 4, 2, 32, 200, 0.0, False), 132) == files[2]


def test_heads_that_are_too_wide_have_no_kernel() -> None:
    """Wider than any model's; or in FP32, where products wait in registers."""
    assert emit_kernel("bounded_attention", bounded_arguments(128, 4, 2, 512, 64, 0.0, False), 132) is None
    q, k, v, *options = bounded_arguments(128, 4, 2, 256, 64, 0.0, False)
    assert emit_kernel("bounded_attention", (q, k, v, *options), 132)
    wide = (Buffer("x", part.shape, "float32") for part in (q, k, v))
    assert emit_kernel("bounded_attention", (*wide, *options), 132) is None


@pytest.mark.parametrize("rising", [True, False])
def test_queues_of_a_window(tmp_path: Path, rising: bool) -> None:
    """Tiles are weighed by what a window leaves of them: programs end at nearly the same time."""
    file = emit_kernel("bounded_attention", bounded_arguments(4096, 64, 8, 64, 512, 0.0, False), 132)
    assert file
    tiles, starts = (x.tolist() for x in load(file, tmp_path)._legs(64, 128, rising, 16, torch.device("cpu")))
    assert sorted(tiles) == list(range(64 * 32))
    lengths = [min(tile % 32 + 1 if rising else 32 - tile % 32, 5) for tile in tiles]
    legs = [sum(2 * length + 1 for length in lengths[a:b]) for a, b in pairwise(starts)]
    busy = [sum(legs[lane::132]) for lane in range(132)]
    assert max(busy) * 132 <= 1.04 * sum(busy)
