"""Rotation of some columns of every head by position, and a factor of all columns.

Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023. T tokens in sequences of S; positions restart with every
sequence, and with every document that begins at `starts` [T]. Where x has some rows of the sequences, `positions` [T]
says which. H heads of C columns, of which `width` from `first` on turn in pairs (x0, x1), (x2, x3) … Pair i turns by
its frequency at each position: theta^(−2i/width), or less, as `ramped` says. With a `stride` x has a row for each so
many tokens, row i of a sequence at position i·stride; a stride of −1 turns back.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor

from runtime.ops.causal import rotate as turned
from runtime.ops.causal import turns
from runtime.ops.product import wide, wide_dtype


def rotate(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    stride: int = 1,
) -> Tensor:
    """x [T, H·C] -> y [T, H·C]: the rotated columns times magnitude·scale, the others times scale.

    x may be a view of columns. `ramped` says what factor, low, high and original mean.
    """
    how = width, theta, factor, low, high, original
    length = sequence // abs(stride)
    angles_Sr = ramped_angles(length, *how, x.dtype, x.device, stride) if width else None
    angles = None if angles_Sr is None else turns(angles_Sr, starts, positions)
    return rotated_by(x, length if positions is None else len(x), heads, first, width, angles, magnitude, scale)


def rotate_dgrad(
    dy: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    stride: int = 1,
) -> Tensor:
    """dy [T, H·C] -> dx [T, H·C]: turned back, with the same factors."""
    how = sequence, heads, first, width, theta, factor, low, high, original, magnitude, scale
    return rotate(dy, *how, starts, positions, -stride)


def rotated_by(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    angles: Tensor | None,
    magnitude: float,
    scale: float,
) -> Tensor:
    """x [B·S, H·C] with its columns rotated by the angles of each position, [S, r] or those of each sequence [B, S, r],
    and multiplied, as `rotate` says."""
    x_BSHC = wide(x).reshape(-1 if len(x) else 0, sequence, heads, x.shape[1] // heads)
    y_BSHC = x_BSHC * scale
    if angles is not None:
        of_pairs = slice(first, first + width)
        y_BSHC[..., of_pairs] = turned(x_BSHC[..., of_pairs], (angles * (magnitude * scale)).unsqueeze(-2))
    return y_BSHC.view(x.shape).to(x.dtype)


@lru_cache(maxsize=16)
def ramped_angles(
    sequence: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    dtype: torch.dtype,
    device: torch.device,
    stride: int = 1,
) -> Tensor:
    """e^(i·pos·f) [S, width/2] with the frequencies f of `ramped`, complex of `dtype`, or of FP32 for BF16; positions
    are `stride` apart."""
    frequency_r = ramped(width, theta, factor, low, high, original)
    phase_Sr = torch.outer(stride * torch.arange(sequence, dtype=torch.float64), frequency_r)
    return torch.polar(torch.ones_like(phase_Sr), phase_Sr).to(device, wide_dtype(dtype).to_complex())


def ramped(width: int, theta: float, factor: float, low: float, high: float, original: float) -> Tensor:
    """The frequencies of the pairs [width/2], FP64: f·(1 − s) + f / factor·s with f = theta^(−2i/width).

    The share s rises from 0 at `low` to 1 at `high`, over the number i of the pair (YaRN). With `original` tokens it
    falls from 1 at `low` to 0 at `high` instead, over the turns of a pair in so many tokens (Llama 3.1).
    """
    frequency_r = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    along_r = original * frequency_r / (2 * pi) if original else torch.arange(width // 2, dtype=torch.float64)
    share_r = ((along_r - low) / (high - low)).clamp(0, 1)
    share_r = 1 - share_r if original else share_r
    return frequency_r * (1 - share_r) + frequency_r / factor * share_r


OPS = (rotate, rotate_dgrad)
