"""Low-precision tensor formats with tiles that share a scale: the keys of a precision that select each, and its sizes.

`runtime.ops.formats` has the arithmetic of each row; FP8 in 1×128 tiles, as in DeepSeek-V3, has its own ops and
kernels. Sources: OCP MX 1.0 and arXiv 2506.08027 (MXFP8), arXiv 2509.25149 (NVFP4), arXiv 2412.19437 (FP8 blocks and
E5M6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["fp64", "fp32", "bf16", "e4m3", "e2m1", "e5m6"]
Scale = Literal["fp32", "e8m0", "e4m3"]

BITS: dict[Dtype, int] = {"e4m3": 8, "e2m1": 4, "e5m6": 12}  # of an element in a tile
SCALE_BYTES: dict[Scale, int] = {"fp32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class FormatFacts:
    """A format. `name` is the suffix of its ops' names; tiles are (rows, columns)."""

    name: str
    element: Dtype
    tile: tuple[int, int]
    weight_tile: tuple[int, int]
    scale: Scale = "fp32"
    tensor_scale: bool = False

    @property
    def keys(self) -> tuple[Dtype, tuple[int, int], tuple[int, int], Scale, bool]:
        """The precision keys that select it: linear, activation_tile, weight_tile, scale, tensor_scale."""
        return self.element, self.tile, self.weight_tile, self.scale, self.tensor_scale


FP8 = FormatFacts("fp8", "e4m3", (1, 128), (128, 128))
E5M6 = FormatFacts("e5m6", "e5m6", (1, 128), (1, 128), "e8m0")
PRODUCTS = (
    FP8,
    FormatFacts("fp8_blocks", "e4m3", (128, 128), (128, 128)),
    FormatFacts("mxfp8", "e4m3", (1, 32), (1, 32), "e8m0"),
    FormatFacts("nvfp4", "e2m1", (1, 16), (16, 16), "e4m3", tensor_scale=True),
)
