"""Formats of tensors with scales: x ≈ element · scale of its tile (· scale of the tensor). R rows, C columns.

A format is a row of `FORMATS`; what follows from it is here, once. A tensor in a format is its planes, in this order:

- data: E4M3 as torch has it [R, C]; E2M1 in bytes of two [R, C / 2]; E5M6 as the 8 high bits of each code [R, C] and
  the 4 low ones in bytes of two [R, C / 2];
- scales, one for each tile, [R / tile rows, C / tile columns], row by row;
- the tensor's own scale, FP32 [], or of experts [E], where the format has one.

Extents round up. Data by columns is transposed, [C, R], as in `quantise`. The scale of a tile, by its dtype:

- FP32: as `quantise` has it, the largest magnitude over the element's largest number.
- E8M0, a power of two: that, rounded up. The rule of OCP MX 1.0 (§6.3) is 2^(⌊log2 m⌋ − 8) of the largest magnitude m,
  which saturates what lies between 448 and 512 of these; NVIDIA's recipe rounds up instead, and shows that training
  then follows BF16 (arXiv 2506.08027, §3.1): so it is done here. As in `quantise`, 1 where the tile is zero.
- E4M3: the largest magnitude over 6, over the tensor's scale, to nearest. The tensor's scale is its largest magnitude
  over 6 · 448, so that these fill E4M3 (arXiv 2509.25149, appendix B). A tile whose scale rounds to zero is zero.

NaN stays NaN where the element has it and leaves its tile alone. A tile with an infinity comes back as NaN, and in E2M1
so does a tile with NaN; the tensor's scale is that of its finite numbers.
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
from runtime.ops.native.library import takes
from runtime.ops.quantise import scales

Planes = tuple[Tensor, ...]
Tile = tuple[int, int]  # rows, columns
COMPILED = {E4M3: torch.float8_e4m3fn, E2M1: torch.uint8}  # elements that there is C++ for: the dtype of their data
STORED = {"fp32": torch.float32, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Format:
    """A way to store tensors in few bits. `name` is the end of the names of its ops."""

    name: str
    element: Element
    tile: Tile  # of activations and gradients, by rows; by columns it is that of the transposed tensor
    weight_tile: Tile
    scale: Literal["fp32", "e8m0", "e4m3"]

    @property
    def planes(self) -> int:
        """How many tensors a tensor in this format is."""
        return 2 + (self.element == E5M6) + (self.scale == "e4m3")


FORMATS = {
    each.name: each
    for each in (
        Format("fp8_blocks", E4M3, (128, 128), (128, 128), "fp32"),
        Format("mxfp8", E4M3, (1, 32), (1, 32), "e8m0"),
        Format("nvfp4", E2M1, (1, 16), (16, 16), "e4m3"),
        Format("e5m6", E5M6, (1, 128), (1, 128), "e8m0"),
    )
}


def packed(x: Tensor, form: Format, tile: Tile, threshold: Tensor | None = None) -> Planes:
    """x [.., R, C] -> its planes, in tiles of `tile`; rounded to nearest, or by thresholds [.., R, C] in [0, 1)."""
    wide = x.to(torch.float32).contiguous()
    s, tensor = _scales(_magnitudes(wide, form.element, tile), form)
    inverse = 1.0 / (s if tensor is None else s * tensor[..., None, None])
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # a tile of a scale that is zero is zero
    planes = (*_data(wide, inverse, tile, form.element, threshold), s.to(STORED[form.scale]))
    return planes if tensor is None else (*planes, tensor)


def unpacked(planes: Planes, form: Format, tile: Tile) -> Tensor:
    """Planes -> numbers (FP32) [.., R, C], without the tensor's own scale: exact where scales are no FP32.

    Of E2M1 C is even: where it was odd, zeros follow.
    """
    *data, s = planes[: form.planes - (form.scale == "e4m3")]
    if form.element in COMPILED and takes(data[0]):
        return ops.decode(data[0], tile, s.to(torch.float32))
    numbers = _numbers(data, form.element)
    wide = s.to(torch.float32).repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return numbers * wide[..., : numbers.shape[-2], : numbers.shape[-1]]


def dequantised(planes: Planes, form: Format, tile: Tile) -> Tensor:
    """Planes -> numbers (FP32), by the tensor's own scale, too."""
    numbers = unpacked(planes, form, tile)
    return numbers * planes[-1][..., None, None] if form.scale == "e4m3" else numbers


def _tiles(x: Tensor, tile: Tile) -> Tensor:
    """x [.., R, C] -> [.., R / tile rows, tile rows, C / tile columns, tile columns], filled up with zeros."""
    rows, columns = tile
    filled = pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
    return filled.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _magnitudes(x: Tensor, element: Element, tile: Tile) -> Tensor:
    """The largest magnitude of each tile; NaN is left out where the element has it, else it is an infinity."""
    if takes(x):
        return ops.magnitudes(x, tile, nan=not element.nan)
    magnitudes = _tiles(x, tile).abs().nan_to_num(nan=0.0 if element.nan else torch.inf, posinf=torch.inf)
    return magnitudes.amax((-3, -1))


def _scales(most: Tensor, form: Format) -> tuple[Tensor, Tensor | None]:
    """The scales of tiles by their largest magnitudes, as FP32 numbers of their dtype, and the tensor's own."""
    finite = torch.where(most.isfinite(), most, 0.0)
    largest = form.element.largest
    if form.scale == "fp32":
        return scales(most, pow2=False), None
    if form.scale == "e8m0":
        s, tensor = _powers(finite, largest), None
    else:
        whole = finite.flatten(-2).amax(-1) if finite.numel() else finite.new_zeros(finite.shape[:-2])
        tensor = (whole / (largest * E4M3.largest)).clamp(min=2.0**-126)
        tensor = torch.where(whole > 0, tensor, 1.0)
        s = (finite / largest / tensor[..., None, None]).clamp(max=E4M3.largest)
        s = s.to(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(most.isfinite(), s, torch.nan), tensor


def _powers(most: Tensor, largest: float) -> Tensor:
    """The least powers of two, from 2⁻¹²⁶ on, that times `largest` are no less than `most`; 1 for zero."""
    of_largest = int(torch.tensor(largest).view(torch.int32))
    # FP32 numbers are in the order of their bits, and a power of two more is 2²³ more
    exponents = ((most.contiguous().view(torch.int32) - of_largest + 0x7FFFFF) >> 23).clamp(min=-126)
    return torch.where(most > 0, ((exponents + 127) << 23).view(torch.float32), 1.0)


def _data(x: Tensor, inverse: Tensor, tile: Tile, element: Element, threshold: Tensor | None) -> Planes:
    """Numbers (FP32), each times what `inverse` says of its tile -> planes of their codes."""
    if element in COMPILED and takes(x):
        return (ops.encode(x, tile, inverse, threshold, COMPILED[element]),)
    R, C = x.shape[-2:]
    scaled = (_tiles(x, tile) * inverse[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :R, :C]
    if element == E4M3 and threshold is None:  # torch rounds to nearest, but makes NaN of what is larger
        return (scaled.clamp(-element.largest, element.largest).to(torch.float8_e4m3fn),)
    codes = elements.encode(scaled.contiguous(), element, threshold)
    if element == E4M3:
        return (codes.to(torch.uint8).view(torch.float8_e4m3fn),)
    if element == E2M1:
        return (elements.pairs(codes),)
    return (codes >> 4).to(torch.uint8), elements.pairs(codes & 15)


def _numbers(data: list[Tensor], element: Element) -> Tensor:
    """Planes of codes -> numbers (FP32) [.., R, C]."""
    if element == E4M3:
        return data[0].to(torch.float32)
    if element == E2M1:
        return elements.decode(elements.unpaired(data[0]), element)
    high, low = data
    codes = high.to(torch.int32) << 4 | elements.unpaired(low)[..., : high.shape[-1]]
    return elements.decode(codes, element)
