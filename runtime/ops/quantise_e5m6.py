"""The output of attention, stored in E5M6 for the backward. DeepSeek-V3, arXiv 2412.19437, §3.3.3.

R rows, C columns, B tiles of 128. E5M6 is three tensors (`formats`): the 8 high bits of each code, the 4 low bits
packed two to a byte, and scales. E4M3 is data and scales (`quantise`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.formats import FORMATS, Planes, dequantise_planes, pack_planes
from runtime.ops.quantise import quantise, quantise_requantise

E5M6 = FORMATS["e5m6"]


def quantise_e5m6(x_RC: Tensor) -> Planes:
    """x_RC -> high_RC, low [R, C / 2], s_RB."""
    return pack_planes(x_RC, E5M6, E5M6.tile)


def dequantise_e5m6(high_RC: Tensor, low: Tensor, s_RB: Tensor) -> Tensor:
    """high_RC, low, s_RB -> x_RC (BF16): exact, except for numbers so small that they are subnormal in BF16."""
    return dequantise_planes((high_RC, low, s_RB), E5M6, E5M6.tile).to(torch.bfloat16)


def quantise_kept_e5m6(x_RC: Tensor, pow2: bool = False) -> Planes:
    """x_RC -> q_RC, s_RB in E4M3, for the linear after attention; high_RC, low, s_RB in E5M6."""
    return *quantise(x_RC, pow2), *quantise_e5m6(x_RC)


def dequantise_quantise_requantise_e5m6(
    high_RC: Tensor, low: Tensor, s_RB: Tensor, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """high_RC, low, s_RB -> q_CR, s_CB in E4M3, for a weight gradient: `quantise_requantise` of the numbers."""
    return quantise_requantise(dequantise_e5m6(high_RC, low, s_RB), pow2)


OPS = (dequantise_e5m6, dequantise_quantise_requantise_e5m6, quantise_e5m6, quantise_kept_e5m6)
