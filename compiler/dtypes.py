"""Dtypes of tensors and what they take; with scales, of eight-bit ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

TORCH_DTYPE = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}  # by a spec's names
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4}
SCALES = "_scales"  # behind the name of a value: the scales of its tiles

Extents = tuple[int | str, ...]  # of a shape: ints, "R" received rows, or "R/128" tiles of them, rounded up

_PACKED = re.compile(r"(?P<element>\w+)\[(?P<rows>\d+)x(?P<columns>\d+)(?P<pow2> pow2)?\]")


@dataclass(frozen=True, slots=True)
class Packed:
    """The dtype of a tensor with an FP32 scale for each tile; with `pow2` scales are powers of two.

    Its text is `float8_e4m3fn[1x128]`, or `float8_e4m3fn[1x128 pow2]`.
    """

    element: str
    rows: int
    columns: int
    pow2: bool = False

    def __str__(self) -> str:
        return f"{self.element}[{self.rows}x{self.columns}{self.pow2 * ' pow2'}]"

    @property
    def by_columns(self) -> bool:
        """Whether tiles lie along columns: the data are stored transposed, so that a tile's elements are neighbours."""
        return self.columns == 1 and self.rows > 1


def is_packed(dtype: str) -> bool:
    """Whether a tensor of this dtype has scales."""
    return dtype.endswith("]")


@cache
def packed_of(dtype: str) -> Packed:
    """The packed dtype of its text."""
    match = _PACKED.fullmatch(dtype)
    assert match, dtype
    return Packed(match["element"], int(match["rows"]), int(match["columns"]), bool(match["pow2"]))


def turned(dtype: str) -> str:
    """The packed dtype with rows and columns of its tiles exchanged."""
    of = packed_of(dtype)
    return str(Packed(of.element, of.columns, of.rows, of.pow2))


@dataclass(frozen=True, slots=True)
class Flat:
    """One of the tensors that a value is stored as. `suffix`: what its name has behind that of the value."""

    suffix: str
    shape: Extents
    dtype: str


def flat_tensors(shape: Extents, dtype: str) -> tuple[Flat, ...]:
    """The tensors of a value that is no weight: itself, or its data and the scales of its tiles.

    With tiles along columns both are transposed.
    """
    if not is_packed(dtype):
        return (Flat("", shape, dtype),)
    of = packed_of(dtype)
    down, across = shape
    data = (across, down) if of.by_columns else (down, across)
    tiles = (of.columns, of.rows) if of.by_columns else (of.rows, of.columns)
    scales = tuple(map(tiles_of, data, tiles))
    return Flat("", data, of.element), Flat(SCALES, scales, "float32")


def tiles_of(extent: int | str, tile: int) -> int | str:
    """How many tiles an extent has."""
    if tile == 1:
        return extent
    return f"{extent}/{tile}" if isinstance(extent, str) else -(-extent // tile)


def has_rows(shape: Extents) -> bool:
    """Whether a shape depends on the number of received rows."""
    return any(isinstance(extent, str) for extent in shape)


@cache
def tensor_bytes(shape: Extents, dtype: str) -> int:
    """Bytes of a tensor, its scales among them; of a received row where an extent is "R" or tiles of R."""
    if not is_packed(dtype):
        rows = (Fraction(1, int(extent[2:] or 1)) for extent in shape if isinstance(extent, str))
        return math.ceil(prod(rows) * prod(e for e in shape if isinstance(e, int)) * ITEMSIZE[dtype])
    of = packed_of(dtype)
    assert len(shape) > 1, (shape, dtype)
    extents = [extent for extent in shape if isinstance(extent, int)]
    *outer, last = extents
    across = -(-last // of.columns)
    down = Fraction(1, of.rows) if "R" in shape else -(-outer[-1] // of.rows)
    tiles = prod(outer[:-1]) * down * across
    return prod(extents) * ITEMSIZE[of.element] + math.ceil(tiles * ITEMSIZE["float32"])
