"""A published tensor and the rows of a checkpoint's tensor that it is made of: both directions, exact.

Rotation: a checkpoint has the two numbers that rotate together side by side, most published models half a head apart
(docs/adr/0007-one-rotation.md). Blocks of FP8: DeepSeek-V3, arXiv 2412.19437, §3.3. MXFP4: OCP Microscaling Formats,
version 1.0, as GPT-OSS is published.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.contract.weights import Halves, RowPiece
from runtime.ops.quantise import quantise_blocks


def to_pairs(rows: Tensor, halves: Halves | None) -> Tensor:
    """Published rows in the order of a checkpoint."""
    return rows if halves is None else _reordered(rows, halves, (2, halves.width // 2))


def to_halves(rows: Tensor, halves: Halves | None) -> Tensor:
    """Rows of a checkpoint in the published order; the inverse of `to_pairs`."""
    return rows if halves is None else _reordered(rows, halves, (halves.width // 2, 2))


def _reordered(rows: Tensor, halves: Halves, sizes: tuple[int, int]) -> Tensor:
    heads = rows.unflatten(0, (-1, halves.head)).clone()
    rotated = slice(halves.first, halves.first + halves.width)
    # clone: of two rotated columns the right side is the same memory, which torch refuses to copy onto itself
    heads[:, rotated] = heads[:, rotated].clone().unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return heads.flatten(0, 1)


def rows_of(piece: RowPiece, whole: Tensor) -> Tensor:
    """The published rows of a piece, from the tensor of a checkpoint that has them."""
    rows = to_halves(whole[piece.start : piece.end], piece.halves)
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if piece.in_turn else rows


def piece_of(rows: Tensor, piece: RowPiece) -> Tensor:
    """The rows of a checkpoint that a piece has, from those that are published; the inverse of `rows_of`."""
    rows = rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if piece.in_turn else rows
    return to_pairs(rows, piece.halves)


def gain_of(difference: Tensor) -> Tensor:
    """1 + what is published, in FP32, or in FP64 where FP32 does not hold every sum exactly."""
    exact = 1 + difference.to(torch.float64)
    narrow = exact.to(torch.float32)
    return narrow if torch.equal(narrow.to(torch.float64) - 1, difference.to(torch.float64)) else exact


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of a number's last three bits; the first is its sign
FP4_BLOCK = 32  # numbers that share a scale, a power of two
FP4_BIAS, FP4_NAN = 127, 255  # of scales


def from_mxfp4(data: Tensor, scales: Tensor) -> Tensor:
    """Data [N, K / 32, 16], two numbers a byte, the first in its low bits; scales [N, K / 32] -> BF16 [N, K], exact."""
    numbers = torch.stack((data & 15, data >> 4), dim=-1).flatten(1).long()  # [N, K]
    values = torch.tensor([*FP4, *(-each for each in FP4)], dtype=torch.float32)[numbers]
    exponents = scales.to(torch.int32) - FP4_BIAS
    return torch.ldexp(values, exponents.repeat_interleave(FP4_BLOCK, 1)).to(torch.bfloat16)


def dequantised(data: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """E4M3 data [N, K] and a scale for each block [⌈N / rows⌉, ⌈K / columns⌉] → FP32, a product rounded once."""
    rows, columns = block
    wide = scales.repeat_interleave(rows, 0)[: data.shape[0]].repeat_interleave(columns, 1)[:, : data.shape[1]]
    return data.to(torch.float32) * wide


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [N, K] → E4M3 data, and the FP32 scale of each block of 128 × 128 numbers."""
    data, scales, _ = quantise_blocks(weight.to(torch.float32))
    return data, scales.contiguous()
