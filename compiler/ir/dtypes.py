"""Dtypes of tensors, quantised ones with scales included, and their sizes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from math import prod

from dsl.facts.formats import E5M6, PRODUCTS, FormatFacts

TORCH_DTYPE = {  # by the spec's names; E2M1 and E5M6 are stored as bytes
    **{"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"},
    **{"e4m3": "float8_e4m3fn", "e2m1": "uint8", "e5m6": "uint8"},
}
ITEMSIZE = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1},
    **{"float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1},
}
SCALE_DTYPE = {"fp32": "float32", "e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}
# Suffixes of a value's name: the low bits of its elements, the scales of its tiles, its per-tensor scale.
LOW, SCALES, SCALE = "_low", "_scales", "_scale"

WHOLE_TENSOR = 2**30  # rows and columns of a tile that covers a whole tensor

Extents = tuple[int | str, ...]  # a shape: ints, "R" for received rows, or "R/128" for tiles of them, rounded up

_PACKED = re.compile(r"(?P<element>\w+)\[(?P<rows>\d+)x(?P<columns>\d+)(?P<flags>( \w+)*)\]")


@dataclass(frozen=True, slots=True)
class PackedDtype:
    """The dtype of a tensor with one scale per tile. `element`: a format (dsl/facts/formats.py), or E4M3 with FP32
    scales.

    Its text is `mxfp8[1x32]` or `float8_e4m3fn[1x128 pow2]`. `flags` of E4M3: `pow2` if scales are powers of two.
    `flags` of formats: `columns` if the tensor is stored transposed, `hadamard` if it is transformed first,
    `stochastic` if it is rounded stochastically.
    """

    element: str
    rows: int
    columns: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.element}[{self.rows}x{self.columns}{''.join(f' {word}' for word in self.flags)}]"

    @property
    def form(self) -> FormatFacts | None:
        """Its format, or None for E4M3 with FP32 scales, which has its own ops and tiles of any size."""
        return next((form for form in (*PRODUCTS, E5M6) if form.name == self.element), None)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor has one scale."""
        return self.rows == self.columns == WHOLE_TENSOR

    @property
    def has_pow2_scales(self) -> bool:
        """Whether FP32 scales are powers of two."""
        return "pow2" in self.flags

    @property
    def is_columnwise(self) -> bool:
        """Whether tiles lie along columns. The data are then stored transposed, so that a tile is contiguous."""
        return "columns" in self.flags or (self.columns == 1 and self.rows > 1)


def data_of(value: str) -> str:
    """The value that a name of scales belongs to. Other names are returned unchanged."""
    return value.removesuffix(SCALES)


def is_packed(dtype: str) -> bool:
    """Whether a tensor of this dtype has scales."""
    return dtype.endswith("]")


@cache
def parse_packed(dtype: str) -> PackedDtype:
    """Parse the text of a packed dtype."""
    match = _PACKED.fullmatch(dtype)
    assert match, dtype
    return PackedDtype(match["element"], int(match["rows"]), int(match["columns"]), tuple(match["flags"].split()))


def transpose_tiles(dtype: str) -> str:
    """The packed dtype with rows and columns of its tiles swapped."""
    packed = parse_packed(dtype)
    return str(PackedDtype(packed.element, packed.columns, packed.rows, packed.flags))


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One of the tensors that store a value. Its name is the value's name and `suffix`."""

    suffix: str
    shape: Extents
    dtype: str


def flat_tensors(shape: Extents, dtype: str) -> tuple[FlatTensor, ...]:
    """The tensors that store a value or a stack of weights: itself, or its data and scales.

    With tiles along columns all are transposed.
    """
    if not is_packed(dtype):
        return (FlatTensor("", shape, dtype),)
    packed = parse_packed(dtype)
    *stack, down, across = shape
    data = (across, down) if packed.is_columnwise else (down, across)
    tiles = (packed.columns, packed.rows) if packed.is_columnwise else (packed.rows, packed.columns)
    scales = (*stack, *map(tiles_of, data, tiles))
    form, data_shape, half_shape = packed.form, (*stack, *data), (*stack, data[0], tiles_of(data[1], 2))
    if form is None:
        return FlatTensor("", data_shape, packed.element), FlatTensor(SCALES, scales, "float32")
    tensors = [FlatTensor("", half_shape if form.element == "e2m1" else data_shape, TORCH_DTYPE[form.element])]
    tensors += [FlatTensor(LOW, half_shape, "uint8")] if form.element == "e5m6" else []
    tensors += [FlatTensor(SCALES, scales, SCALE_DTYPE[form.scale])]
    tensors += [FlatTensor(SCALE, tuple(stack), "float32")] if form.tensor_scale else []
    return tuple(tensors)


def tiles_of(extent: int | str, tile: int) -> int | str:
    """The number of tiles in an extent, rounded up."""
    if tile == 1:
        return extent
    return f"{extent}/{tile}" if isinstance(extent, str) else -(-extent // tile)


def extent_at(extent: int | str, rows: int, copies: int = 0, forwarded: int = 0) -> int:
    """An extent for this number of received rows (R), token copies (P) and forwarded rows (X)."""
    if isinstance(extent, int):
        return extent
    return -(-{"R": rows, "P": copies, "X": forwarded}[extent[0]] // int(extent[2:] or 1))


@cache
def has_rows(shape: Extents) -> bool:
    """Whether a shape depends on the number of received or forwarded rows."""
    return any(isinstance(extent, str) for extent in shape)


@cache
def tensor_bytes(shape: Extents, dtype: str) -> int:
    """Bytes of a tensor, scales included; bytes per received row if an extent is "R" or tiles of R."""
    if not is_packed(dtype):
        rows = (Fraction(1, int(extent[2:] or 1)) for extent in shape if isinstance(extent, str))
        return math.ceil(prod(rows) * prod(e for e in shape if isinstance(e, int)) * ITEMSIZE[dtype])
    assert len(shape) > 1, (shape, dtype)
    return sum(tensor_bytes(tensor.shape, tensor.dtype) for tensor in flat_tensors(shape, dtype))


@lru_cache(maxsize=1 << 16)
def bytes_at(shape: Extents, dtype: str, rows: int, copies: int, forwarded: int) -> int:
    """Bytes of a tensor for these numbers of received rows, token copies and forwarded rows."""
    return tensor_bytes(tuple(extent_at(extent, rows, copies, forwarded) for extent in shape), dtype)
