"""The FP8 products in Triton's interpreter. The checks are in checks_linear_fp8.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from compiler.emit.kernels import emit_kernel
from compiler.emit.kernels.linear_fp8 import rows_by_weight
from compiler.ir import Buffer

Interpret = Callable[..., Any]
CHECKS = "tests.compiler.emit.kernels.checks_linear_fp8"


@pytest.mark.parametrize(
    ("rows", "out", "inner"),
    [
        (0, 64, 64),
        (1, 16, 16),
        (7, 48, 272),  # rows of the transposed operands at odd addresses
        (200, 208, 144),  # the second tile is only partly filled: 16 columns
        (130, 576, 128),  # tiles of 192 columns that begin amid a block of the weight
        (257, 64, 512),  # a tile of 64, and one of 128
    ],
)
def test_linear_fp8(interpret: Interpret, rows: int, out: int, inner: int) -> None:
    interpret(CHECKS, "linear_fp8", rows, out, inner)


def test_nan_does_not_spread(interpret: Interpret) -> None:
    interpret(CHECKS, "nan_stays_where_it_is")


@pytest.mark.parametrize("name", ["e4m3_casts", "e4m3_products"])
def test_the_interpreter_rounds(interpret: Interpret, name: str) -> None:
    interpret(CHECKS, name)


@pytest.mark.parametrize(("out", "columns"), [(64, 64), (96, 128), (192, 192), (512, 128), (576, 192), (7168, 192)])
def test_the_tile_fits_the_columns(out: int, columns: int) -> None:
    tile = rows_by_weight(out)
    assert tile["WIDE"] + tile["NARROW"] == columns
    assert rows_by_weight(out, gathered=True)["NARROW"] == 0


def test_rows_must_begin_at_16_bytes() -> None:
    def call(inner: int, dtype: str = "float8_e4m3fn") -> Any:
        x, w = Buffer("x", (128, inner), dtype), Buffer("w", (64, inner), dtype)
        scales = Buffer("scales", (1, 1), "float32")
        return emit_kernel("linear_fp8", (x, scales, w, scales), 132)

    assert call(48) and not call(40) and not call(48, "bfloat16")
