"""Quantising to E4M3 with an FP32 scale for each tile: x ≈ data · scale. R rows, C columns, B tiles of 128.

A tile is 1×128 (of a row), 128×1 (of a column) or 128×128 (of a weight); the last one of a side may be smaller. As
DeepSeek-V3 does (arXiv 2412.19437, §3.3): a tile's scale is its largest magnitude over 448, the largest E4M3 number
(times FP32's 1/448), or with `pow2` the next power of two, by which multiplying is exact. It is 1 where the tile is
zero, and 2⁻¹²⁶ at least, so that its inverse is finite. NaN stays NaN and leaves its tile alone; a tile that holds an
infinity comes back as NaN altogether, for its scale is infinite.

Scales [R, B] are stored column by column, as their readers take them. Data by columns is transposed: [C, R], so that
a product summed over rows finds its terms side by side. Tiles of columns run over the rows of the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.ops.native import ops
from runtime.ops.native.library import takes

TILE = 128
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn
SMALLEST_SCALE = 2.0**-126


def quantise(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> data q_RC, scales s_RB: tiles of rows."""
    if takes(x_RC):
        return ops.quantise(x_RC, pow2)
    R, C = x_RC.shape
    tiles_RBt = pad(x_RC.to(torch.float32), (0, -C % TILE)).view(R, -(-C // TILE), TILE)
    s_RB = scales(_magnitudes(tiles_RBt).amax(-1), pow2)
    q_RC = _encode(tiles_RBt, s_RB[:, :, None]).flatten(1)[:, :C].contiguous()
    return q_RC, s_RB.t().contiguous().t()


def quantise_columns(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> data q_CR, scales s_CB: tiles of columns, transposed."""
    if takes(x_RC):
        return ops.quantise_columns(x_RC, pow2)
    return quantise(x_RC.t(), pow2)


def quantise_both(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_RC -> q_RC, s_RB, q_CR, s_CB: both of a gradient that an input's and a weight's product read."""
    return *quantise(x_RC, pow2), *quantise_columns(x_RC, pow2)


def quantise_blocks(w_NK: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w_NK [N, K], or of experts [E, N, K] -> q_NK, s [N / 128, K / 128], q_KN: blocks, and the data transposed.

    The scales of the transposed data are these transposed.
    """
    if takes(w_NK):
        return ops.quantise_blocks(w_NK, pow2)
    N, K = w_NK.shape[-2:]
    padded = pad(w_NK.to(torch.float32), (0, -K % TILE, 0, -N % TILE))
    blocks = padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))  # [.., N / 128, 128, K / 128, 128]
    s = scales(_magnitudes(blocks).amax((-3, -1)), pow2)
    q_NK = _encode(blocks, s[..., :, None, :, None]).view(padded.shape)[..., :N, :K].contiguous()
    return q_NK, s, q_NK.transpose(-1, -2).contiguous()


def requantise(q_RC: Tensor, s_RB: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """q_RC, s_RB in tiles of rows -> q_CR, s_CB in tiles of columns, by way of FP32."""
    if takes(q_RC):
        return ops.requantise(q_RC, s_RB, pow2)
    return quantise_columns(dequantise(q_RC, s_RB), pow2)


def quantise_requantise(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> q_CR, s_CB: `requantise` of `quantise`, as a weight gradient reads what its forward read by rows."""
    return requantise(*quantise(x_RC, pow2), pow2)


def dequantise(q: Tensor, s: Tensor) -> Tensor:
    """Data and scales of tiles of rows or of blocks -> FP32, a scale times a number rounded once."""
    if takes(q) and s.shape[:-1] == q.shape[:-1] and q.dim() == 2:
        return ops.dequantise(q, s)
    wide = s.repeat_interleave(TILE, -1)[..., : q.shape[-1]]
    if s.shape[-2] != q.shape[-2]:
        wide = wide.repeat_interleave(TILE, -2)[..., : q.shape[-2], :]
    return q.to(torch.float32) * wide


def scales(most: Tensor, pow2: bool) -> Tensor:
    """The scales, FP32, of tiles whose largest magnitudes are `most`."""
    s = (most * (1 / LARGEST)).clamp(min=SMALLEST_SCALE)
    if pow2:  # any bit of the significand carries into the exponent, then goes
        s = ((s.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return torch.where(most > 0, s, torch.ones_like(s))


def _magnitudes(tiles: Tensor) -> Tensor:
    return tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf)


def _encode(tiles: Tensor, s: Tensor) -> Tensor:
    return (tiles * (1.0 / s)).clamp_(-LARGEST, LARGEST).to(E4M3)  # torch makes NaN of what is larger


OPS = (quantise, quantise_columns, quantise_both, quantise_blocks, requantise, quantise_requantise)
