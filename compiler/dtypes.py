"""Dtypes of tensors and what they take; with scales, of eight-bit ones."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cache
from math import prod

TORCH_DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}  # by a spec's names
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4}

_PACKED = re.compile(r"(?P<element>\w+)\[(?P<rows>\d+)x(?P<columns>\d+)\]")


def packed(element: str, rows: int, columns: int) -> str:
    """The dtype of tensors with an FP32 scale for each tile: `float8_e4m3fn[1x128]`."""
    return f"{element}[{rows}x{columns}]"


def is_packed(dtype: str) -> bool:
    """Whether a tensor of this dtype has scales."""
    return dtype.endswith("]")


def turned(dtype: str) -> str:
    """The packed dtype with rows and columns of its tiles exchanged."""
    match = _PACKED.fullmatch(dtype)
    assert match, dtype
    return packed(match["element"], int(match["columns"]), int(match["rows"]))


@cache
def tensor_bytes(shape: tuple[int | str, ...], dtype: str) -> int:
    """Bytes of a tensor, its scales among them; of a received row where dimension 0 is R."""
    extents = [extent for extent in shape if isinstance(extent, int)]
    if not is_packed(dtype):
        return prod(extents) * ITEMSIZE[dtype]
    match = _PACKED.fullmatch(dtype)
    assert match and len(shape) > 1, (shape, dtype)
    *outer, last = extents
    across = -(-last // int(match["columns"]))
    down = Fraction(1, int(match["rows"])) if "R" in shape else -(-outer[-1] // int(match["rows"]))
    tiles = prod(outer[:-1]) * down * across
    return prod(extents) * ITEMSIZE[match["element"]] + math.ceil(tiles * ITEMSIZE["float32"])
