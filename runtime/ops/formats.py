"""Formats of scaled low-bit tensors: x ≈ element · tile scale (· tensor scale). R rows, C columns.

A format is a row of `FORMATS`; this module derives everything else from it. A tensor in a format is stored as planes,
in this order:

- data: E4M3 as torch's dtype [R, C]; E2M1 packed two to a byte [R, C / 2]; E5M6 as the 8 high bits of each code [R, C]
  and the 4 low bits packed two to a byte [R, C / 2];
- scales, one per tile, row-major [R / tile rows, C / tile columns];
- the tensor scale, FP32 [], or one per expert [E], if the format has one.

Extents round up. Data by columns is transposed, [C, R], as in `quantise`. The scale of a tile, by its dtype:

- FP32: the largest magnitude divided by the element's largest number, as in `quantise`.
- E8M0, a power of two: the same, rounded up. OCP MX 1.0 (§6.3) specifies 2^(⌊log2 m⌋ − 8) for the largest magnitude m,
  which saturates scaled numbers between 448 and 512. NVIDIA's recipe rounds up instead, and shows that training then
  follows BF16 (arXiv 2506.08027, §3.1); this module does the same. The scale of a zero tile is 1, as in `quantise`.
- E4M3: the largest magnitude / 6 / the tensor scale, rounded to nearest. The tensor scale is the tensor's largest
  magnitude / (6 · 448), so that tile scales use the whole range of E4M3 (arXiv 2509.25149, appendix B). A tile whose
  scale rounds to zero is zero.

NaN stays NaN if the element has it, and does not affect its tile. A tile with an infinity decodes to NaN, and so does
an E2M1 tile with a NaN; the tensor scale is that of the finite numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.ops import elements
from runtime.ops.elements import E2M1, E4M3, E5M6, Element
from runtime.ops.native import ops
from runtime.ops.native.library import runs_natively
from runtime.ops.quantise import scales

Planes = tuple[Tensor, ...]
Tile = tuple[int, int]  # rows, columns
COMPILED = {E4M3: torch.float8_e4m3fn, E2M1: torch.uint8}  # elements with C++ ops, and the dtype of their data
STORED = {"fp32": torch.float32, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Format:
    """A way to store tensors in few bits. The names of its ops end in `name`."""

    name: str
    element: Element
    tile: Tile  # for activations and gradients by rows; by columns, it tiles the transposed tensor
    weight_tile: Tile
    scale: Literal["fp32", "e8m0", "e4m3"]

    @property
    def planes(self) -> int:
        """The number of planes of a tensor in this format."""
        return 2 + (self.element == E5M6) + (self.scale == "e4m3")


FORMATS = {
    form.name: form
    for form in (
        Format("fp8_blocks", E4M3, (128, 128), (128, 128), "fp32"),
        Format("mxfp8", E4M3, (1, 32), (1, 32), "e8m0"),
        Format("nvfp4", E2M1, (1, 16), (16, 16), "e4m3"),
        Format("e5m6", E5M6, (1, 128), (1, 128), "e8m0"),
    )
}


def pack_planes(x: Tensor, form: Format, tile: Tile, threshold: Tensor | None = None) -> Planes:
    """x [.., R, C] -> planes, in tiles of `tile`; rounded to nearest, or by thresholds [.., R, C] in [0, 1)."""
    wide = x.to(torch.float32).contiguous()
    s, tensor = _scales(_magnitudes(wide, form.element, tile), form)
    inverse = 1.0 / (s if tensor is None else s * tensor[..., None, None])
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # a tile with scale zero is zero
    planes = (*_data(wide, inverse, tile, form.element, threshold), s.to(STORED[form.scale]))
    return planes if tensor is None else (*planes, tensor)


def unpack_planes(planes: Planes, form: Format, tile: Tile) -> Tensor:
    """Planes -> numbers (FP32) [.., R, C], without the tensor scale: exact unless the scales are FP32.

    For E2M1, C is even: an odd C is padded with a column of zeros.
    """
    *data, s = planes[: form.planes - (form.scale == "e4m3")]
    if form.element in COMPILED and runs_natively(data[0]):
        return ops.decode(data[0], tile, s.to(torch.float32))
    numbers = _numbers(data, form.element)
    wide = s.to(torch.float32).repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return numbers * wide[..., : numbers.shape[-2], : numbers.shape[-1]]


def dequantise_planes(planes: Planes, form: Format, tile: Tile) -> Tensor:
    """Planes -> numbers (FP32), including the tensor scale."""
    numbers = unpack_planes(planes, form, tile)
    return numbers * planes[-1][..., None, None] if form.scale == "e4m3" else numbers


def _tiles(x: Tensor, tile: Tile) -> Tensor:
    """x [.., R, C] -> [.., R / tile rows, tile rows, C / tile columns, tile columns], padded with zeros."""
    rows, columns = tile
    filled = pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return filled.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _magnitudes(x: Tensor, element: Element, tile: Tile) -> Tensor:
    """Return the largest magnitude of each tile. NaN is skipped if the element has NaN; otherwise it counts as
    infinity."""
    if runs_natively(x):
        return ops.magnitudes(x, tile, nan=not element.nan)
    magnitudes = _tiles(x, tile).abs().nan_to_num(nan=0.0 if element.nan else torch.inf, posinf=torch.inf)
    return magnitudes.amax((-3, -1))


def _scales(magnitudes: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """Return tile scales from largest magnitudes, as FP32 rounded to the scale's dtype, and the tensor scale."""
    finite = torch.where(magnitudes.isfinite(), magnitudes, 0.0)
    largest = form.element.largest
    if form.scale == "fp32":
        return scales(magnitudes, pow2=False), None
    if form.scale == "e8m0":
        s, tensor = _powers(finite, largest), None
    else:
        amax = finite.flatten(-2).amax(-1) if finite.numel() else finite.new_zeros(finite.shape[:-2])
        tensor = (amax / (largest * E4M3.largest)).clamp(min=2.0**-126)
        tensor = torch.where(amax > 0, tensor, 1.0)
        s = (finite / largest / tensor[..., None, None]).clamp(max=E4M3.largest)
        s = s.to(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(magnitudes.isfinite(), s, torch.nan), tensor


def _powers(magnitudes: Tensor, largest: float) -> Tensor:
    """Return the smallest powers of two p ≥ 2⁻¹²⁶ with p · `largest` ≥ `magnitudes`; 1 where `magnitudes` is 0."""
    of_largest = int(torch.tensor(largest).view(torch.int32))
    # positive FP32 numbers sort like their bits, and the next power of two is 2²³ higher
    exponents = ((magnitudes.contiguous().view(torch.int32) - of_largest + 0x7FFFFF) >> 23).clamp(min=-126)
    return torch.where(magnitudes > 0, ((exponents + 127) << 23).view(torch.float32), 1.0)


def _data(x: Tensor, inverse: Tensor, tile: Tile, element: Element, threshold: Tensor | None) -> Planes:
    """Numbers (FP32), multiplied by the `inverse` of their tile's scale -> planes of their codes."""
    if element in COMPILED and runs_natively(x):
        return (ops.encode(x, tile, inverse, threshold, COMPILED[element]),)
    R, C = x.shape[-2:]
    scaled = (_tiles(x, tile) * inverse[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :R, :C]
    if element == E4M3 and threshold is None:  # torch rounds to nearest, but turns larger numbers into NaN
        return (scaled.clamp(-element.largest, element.largest).to(torch.float8_e4m3fn),)
    codes = elements.encode(scaled.contiguous(), element, threshold)
    if element == E4M3:
        return (codes.to(torch.uint8).view(torch.float8_e4m3fn),)
    if element == E2M1:
        return (elements.pairs(codes),)
    return (codes >> 4).to(torch.uint8), elements.pairs(codes & 15)


def _numbers(data: list[Tensor], element: Element) -> Tensor:
    """Planes of codes -> unscaled numbers (FP32) [.., R, C]."""
    if element == E4M3:
        return data[0].to(torch.float32)
    if element == E2M1:
        return elements.decode(elements.unpack_pairs(data[0]), element)
    high, low = data
    codes = high.to(torch.int32) << 4 | elements.unpack_pairs(low)[..., : high.shape[-1]]
    return elements.decode(codes, element)
