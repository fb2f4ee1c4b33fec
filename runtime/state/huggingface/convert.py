"""Exact conversions between published tensors and rows of a checkpoint's tensors.

Rotary embedding: a checkpoint has the two numbers of a rotated pair side by side, most published models half a head
apart (docs/adr/0007-one-rotation.md). FP8 blocks: DeepSeek-V3, arXiv 2412.19437, §3.3. MXFP4: OCP Microscaling Formats,
version 1.0, as in GPT-OSS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.contract.weights import Halves, RowPiece
from runtime.ops.quantise import quantise_blocks


def to_pairs(rows: Tensor, halves: Halves | None) -> Tensor:
    """Reorder published rows as a checkpoint has them."""
    return rows if halves is None else _reorder(rows, halves, (2, halves.width // 2))


def to_halves(rows: Tensor, halves: Halves | None) -> Tensor:
    """Reorder rows of a checkpoint as they are published; the inverse of `to_pairs`."""
    return rows if halves is None else _reorder(rows, halves, (halves.width // 2, 2))


def _reorder(rows: Tensor, halves: Halves, sizes: tuple[int, int]) -> Tensor:
    heads = rows.unflatten(0, (-1, halves.head)).clone()
    rotated = slice(halves.first, halves.first + halves.width)
    # clone: with two rotated columns the right side is a view of the left, which torch refuses to copy onto itself
    heads[:, rotated] = heads[:, rotated].clone().unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return heads.flatten(0, 1)


def rows_of(piece: RowPiece, tensor: Tensor) -> Tensor:
    """Return the published rows of a piece from the checkpoint's tensor."""
    rows = to_halves(tensor[piece.start : piece.end], piece.halves)
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if piece.in_turn else rows


def piece_of(rows: Tensor, piece: RowPiece) -> Tensor:
    """Return a checkpoint's rows of a piece from the published rows; the inverse of `rows_of`."""
    rows = rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if piece.in_turn else rows
    return to_pairs(rows, piece.halves)


def gain_of(difference: Tensor) -> Tensor:
    """Return 1 + the published values, in FP32, or in FP64 if FP32 cannot hold every sum exactly."""
    exact = 1 + difference.to(torch.float64)
    narrow = exact.to(torch.float32)
    return narrow if torch.equal(narrow.to(torch.float64) - 1, difference.to(torch.float64)) else exact


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the low three bits; the high bit is the sign
FP4_BLOCK = 32  # numbers that share a scale, a power of two
FP4_BIAS, FP4_NAN = 127, 255  # of scales


def from_mxfp4(data: Tensor, scales: Tensor) -> Tensor:
    """Data [N, K / 32, 16], two numbers a byte, the first in its low bits; scales [N, K / 32] -> BF16 [N, K], exact."""
    numbers = torch.stack((data & 15, data >> 4), dim=-1).flatten(1).long()  # [N, K]
    values = torch.tensor([*FP4, *(-value for value in FP4)], dtype=torch.float32)[numbers]
    exponents = scales.to(torch.int32) - FP4_BIAS
    return torch.ldexp(values, exponents.repeat_interleave(FP4_BLOCK, 1)).to(torch.bfloat16)


def dequantise_e4m3(data: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantise E4M3 data [N, K] with block scales [⌈N / rows⌉, ⌈K / columns⌉] to FP32, rounded once."""
    rows, columns = block
    wide = scales.repeat_interleave(rows, 0)[: data.shape[0]].repeat_interleave(columns, 1)[:, : data.shape[1]]
    return data.to(torch.float32) * wide


def quantise_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix [N, K] to E4M3 data and one FP32 scale per block of 128 × 128."""
    data, scales, _ = quantise_blocks(weight.to(torch.float32))
    return data, scales.contiguous()
