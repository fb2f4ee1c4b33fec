"""Quantising to E4M3 with an FP32 scale for each tile: x ≈ data · scale. R rows, C columns, B tiles of 128.

A tile is 1×128 (of a row), 128×1 (of a column) or 128×128 (of a weight); the last tile along a dimension may be
smaller. As in DeepSeek-V3 (arXiv 2412.19437, §3.3), a tile's scale is its largest magnitude divided by 448, the largest
E4M3 number (computed as a product with FP32's 1/448), or with `pow2` the next power of two, so that scaling is exact.
The scale of a zero tile is 1. Scales are at least 2⁻¹²⁶, so that their inverses are finite. NaN stays NaN and does not
affect its tile; a tile with an infinity has an infinite scale and decodes to NaN entirely.

Scales [R, B] are stored column by column, as their readers expect. Data by columns is transposed, [C, R], so that a
product that sums over rows reads contiguous terms. Column tiles are counted from the first row of the whole tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.ops.native import ops
from runtime.ops.native.library import runs_natively

TILE = 128
LARGEST = 448.0
E4M3 = torch.float8_e4m3fn
SMALLEST_SCALE = 2.0**-126


def quantise(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> data q_RC, scales s_RB: tiles of rows."""
    if runs_natively(x_RC):
        return ops.quantise(x_RC, pow2)
    R, C = x_RC.shape
    tiles_RBt = pad(x_RC.to(torch.float32), (0, -C % TILE)).view(R, -(-C // TILE), TILE)
    s_RB = scales(_magnitudes(tiles_RBt).amax(-1), pow2)
    q_RC = _encode(tiles_RBt, s_RB[:, :, None]).flatten(1)[:, :C].contiguous()
    return q_RC, s_RB.t().contiguous().t()


def quantise_columns(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> data q_CR, scales s_CB: tiles of columns, transposed."""
    if runs_natively(x_RC):
        return ops.quantise_columns(x_RC, pow2)
    return quantise(x_RC.t(), pow2)


def quantise_both(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_RC -> q_RC, s_RB, q_CR, s_CB: a gradient by rows for an input gradient, and by columns for a weight
    gradient."""
    return *quantise(x_RC, pow2), *quantise_columns(x_RC, pow2)


def quantise_blocks(w_NK: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """w_NK, or w_ENK of experts -> q_NK, s [N / 128, K / 128], q_KN: tiles of 128×128, and the data transposed.

    The scales of the transposed data are s transposed.
    """
    if runs_natively(w_NK):
        return ops.quantise_blocks(w_NK, pow2)
    N, K = w_NK.shape[-2:]
    padded = pad(w_NK.to(torch.float32), (0, -K % TILE, 0, -N % TILE))
    blocks = padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))  # [.., N / 128, 128, K / 128, 128]
    s = scales(_magnitudes(blocks).amax((-3, -1)), pow2)
    q_NK = _encode(blocks, s[..., :, None, :, None]).view(padded.shape)[..., :N, :K].contiguous()
    return q_NK, s, q_NK.transpose(-1, -2).contiguous()


def requantise(q_RC: Tensor, s_RB: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """q_RC, s_RB in row tiles -> q_CR, s_CB in column tiles, converted through FP32."""
    if runs_natively(q_RC):
        return ops.requantise(q_RC, s_RB, pow2)
    return quantise_columns(dequantise(q_RC, s_RB), pow2)


def quantise_requantise(x_RC: Tensor, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """x_RC -> q_CR, s_CB: `requantise` of `quantise`. A weight gradient then reads the numbers its forward read."""
    return requantise(*quantise(x_RC, pow2), pow2)


def dequantise(q: Tensor, s: Tensor) -> Tensor:
    """Data and scales of row tiles or blocks -> FP32: scale times number, rounded once."""
    if runs_natively(q) and s.shape[:-1] == q.shape[:-1] and q.dim() == 2:
        return ops.dequantise(q, s)
    wide = s.repeat_interleave(TILE, -1)[..., : q.shape[-1]]
    if s.shape[-2] != q.shape[-2]:
        wide = wide.repeat_interleave(TILE, -2)[..., : q.shape[-2], :]
    return q.to(torch.float32) * wide


def scales(magnitudes: Tensor, pow2: bool) -> Tensor:
    """Return the scales (FP32) of tiles whose largest magnitudes are `magnitudes`."""
    s = (magnitudes * (1 / LARGEST)).clamp(min=SMALLEST_SCALE)
    if pow2:  # any set significand bit carries into the exponent, then the significand is cleared
        s = ((s.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32)
    return torch.where(magnitudes > 0, s, torch.ones_like(s))


def _magnitudes(tiles: Tensor) -> Tensor:
    return tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf)


def _encode(tiles: Tensor, s: Tensor) -> Tensor:
    return (tiles * (1.0 / s)).clamp_(-LARGEST, LARGEST).to(E4M3)  # torch turns larger numbers into NaN


OPS = (quantise, quantise_columns, quantise_both, quantise_blocks, requantise, quantise_requantise)
