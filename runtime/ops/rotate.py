"""Rotation of some columns of every head by position, and a factor of all columns.

Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023. T tokens in sequences of S; positions restart with every
sequence, and with every document that begins at `starts` [T]. Where x has some rows of the sequences, `positions` [T]
says which. H heads of C columns, of which `width` from `first` on turn in pairs (x0, x1), (x2, x3) … Pair i turns by
its frequency at each position: theta^(−2i/width), or less, as `ramped` says.
"""

from __future__ import annotations

from functools import lru_cache
from math import pi

import torch
from torch import Tensor

from runtime.ops.causal import back, turns
from runtime.ops.causal import rotate as turned
from runtime.ops.wide import wide, wide_dtype


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
) -> Tensor:
    """x [T, H·C] -> y [T, H·C]: the rotated columns times magnitude·scale, the others times scale.

    x may be a view of columns. `ramped` says what factor, low, high and original mean.
    """
    how = width, theta, factor, low, high, original
    angles = turns(ramped_angles(sequence, *how, x.dtype, x.device), starts, positions) if width else None
    rows = len(x) if positions is not None else sequence
    return rotated_by(x, rows, heads, first, width, angles, magnitude, scale)


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
) -> Tensor:
    """dy [T, H·C] -> dx [T, H·C]: turned back, with the same factors."""
    how = width, theta, factor, low, high, original
    angles_Sr = back(ramped_angles(sequence, *how, dy.dtype, dy.device)) if width else None
    angles = None if angles_Sr is None else turns(angles_Sr, starts, positions)
    rows = len(dy) if positions is not None else sequence
    return rotated_by(dy, rows, heads, first, width, angles, magnitude, scale)


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
    x_BSHC = wide(x).reshape(-1, sequence, heads, x.shape[1] // heads)
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
) -> Tensor:
    """e^(i·pos·f) [S, width/2] with the frequencies f of `ramped`, complex of `dtype`, or of FP32 for BF16."""
    frequency_r = ramped(width, theta, factor, low, high, original)
    phase_Sr = torch.outer(torch.arange(sequence, dtype=torch.float64), frequency_r)
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
