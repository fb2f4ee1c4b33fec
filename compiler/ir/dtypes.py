"""Dtypes of tensors and what they take; with scales, of those of few bits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

from dsl.facts.formats import E5M6, PRODUCTS, FormatFacts

TORCH_DTYPE = {  # by a spec's names; bytes of codes of E2M1 and E5M6
    **{"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"},
    **{"e4m3": "float8_e4m3fn", "e2m1": "uint8", "e5m6": "uint8"},
}
ITEMSIZE = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1},
}
SCALE_DTYPE = {"fp32": "float32", "e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}
# Behind the name of a value: the low bits of its elements, the scales of its tiles, its own scale.
LOW, SCALES, SCALE = "_low", "_scales", "_scale"

WHOLE = 2**30  # rows and columns of a tile that is all of a tensor

Extents = tuple[int | str, ...]  # of a shape: ints, "R" received rows, or "R/128" tiles of them, rounded up

_PACKED = re.compile(r"(?P<element>\w+)\[(?P<rows>\d+)x(?P<columns>\d+)(?P<how>( \w+)*)\]")


@dataclass(frozen=True, slots=True)
class Packed:
    """The dtype of a tensor with a scale for each tile. `element`: a format (dsl/facts/formats.py), or E4M3, whose
    scales are FP32.

    Its text is `mxfp8[1x32]`, or `float8_e4m3fn[1x128 pow2]`. `how` has words: of E4M3 `pow2`, where scales are powers
    of two; of formats `columns`, where the tensor is stored transposed, and then `hadamard`, where it is transformed
    first, and `stochastic`, where it is rounded so.
    """

    element: str
    rows: int
    columns: int
    how: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.element}[{self.rows}x{self.columns}{''.join(f' {word}' for word in self.how)}]"

    @property
    def form(self) -> FormatFacts | None:
        """Its format; None of E4M3 that has ops of its own, in tiles of any size."""
        return next((form for form in (*PRODUCTS, E5M6) if form.name == self.element), None)

    @property
    def is_whole(self) -> bool:
        """Whether a tensor has one scale for all of it."""
        return self.rows == self.columns == WHOLE

    @property
    def pow2(self) -> bool:
        """Whether FP32 scales are powers of two."""
        return "pow2" in self.how

    @property
    def by_columns(self) -> bool:
        """Whether tiles lie along columns: the data are stored transposed, so that a tile's elements are neighbours."""
        return "columns" in self.how or (self.columns == 1 and self.rows > 1)


def data_of(value: str) -> str:
    """The value whose scales a name is of; the name of anything else stays."""
    return value.removesuffix(SCALES)


def is_packed(dtype: str) -> bool:
    """Whether a tensor of this dtype has scales."""
    return dtype.endswith("]")


@cache
def packed_of(dtype: str) -> Packed:
    """The packed dtype of its text."""
    match = _PACKED.fullmatch(dtype)
    assert match, dtype
    return Packed(match["element"], int(match["rows"]), int(match["columns"]), tuple(match["how"].split()))


def turned(dtype: str) -> str:
    """The packed dtype with rows and columns of its tiles exchanged."""
    of = packed_of(dtype)
    return str(Packed(of.element, of.columns, of.rows, of.how))


@dataclass(frozen=True, slots=True)
class Flat:
    """One of the tensors that a value is stored as. `suffix`: what its name has behind that of the value."""

    suffix: str
    shape: Extents
    dtype: str


def flat_tensors(shape: Extents, dtype: str) -> tuple[Flat, ...]:
    """The tensors of a value, or of a stack of weights: itself, or its data, the scales of its tiles and its own.

    With tiles along columns all are transposed.
    """
    if not is_packed(dtype):
        return (Flat("", shape, dtype),)
    of = packed_of(dtype)
    *stack, down, across = shape
    data = (across, down) if of.by_columns else (down, across)
    tiles = (of.columns, of.rows) if of.by_columns else (of.rows, of.columns)
    scales = (*stack, *map(tiles_of, data, tiles))
    form, whole, halves = of.form, (*stack, *data), (*stack, data[0], tiles_of(data[1], 2))
    if form is None:
        return Flat("", whole, of.element), Flat(SCALES, scales, "float32")
    found = [Flat("", halves if form.element == "e2m1" else whole, TORCH_DTYPE[form.element])]
    found += [Flat(LOW, halves, "uint8")] if form.element == "e5m6" else []
    found += [Flat(SCALES, scales, SCALE_DTYPE[form.scale])]
    found += [Flat(SCALE, tuple(stack), "float32")] if form.tensor_scale else []
    return tuple(found)


def tiles_of(extent: int | str, tile: int) -> int | str:
    """How many tiles an extent has."""
    if tile == 1:
        return extent
    return f"{extent}/{tile}" if isinstance(extent, str) else -(-extent // tile)


def extent_at(extent: int | str, rows: int, copies: int = 0, forwarded: int = 0) -> int:
    """An extent with so many received rows (R), and copies (P) and rows (X) that are forwarded."""
    if isinstance(extent, int):
        return extent
    return -(-{"R": rows, "P": copies, "X": forwarded}[extent[0]] // int(extent[2:] or 1))


@cache
def has_rows(shape: Extents) -> bool:
    """Whether a shape depends on the number of rows that are received, or forwarded."""
    return any(isinstance(extent, str) for extent in shape)


@cache
def tensor_bytes(shape: Extents, dtype: str) -> int:
    """Bytes of a tensor, its scales among them; of a received row where an extent is "R" or tiles of R."""
    if not is_packed(dtype):
        rows = (Fraction(1, int(extent[2:] or 1)) for extent in shape if isinstance(extent, str))
        return math.ceil(prod(rows) * prod(e for e in shape if isinstance(e, int)) * ITEMSIZE[dtype])
    assert len(shape) > 1, (shape, dtype)
    return sum(tensor_bytes(each.shape, each.dtype) for each in flat_tensors(shape, dtype))
