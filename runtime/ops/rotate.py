"""Rotary embedding (RoPE) of some columns of every head, and a scale for all columns.

Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023. T tokens in sequences of S; positions restart with every
sequence and, with `starts` [T], with every document. If x has only some rows of the sequences, `positions` [T] gives
their positions. H heads of C columns; the `width` columns from `first` on rotate in pairs (x0, x1), (x2, x3) … Pair i
rotates by its frequency per position: theta^(−2i/width), or less, see `ramped_frequencies`. With a `stride`, x has one
row per `stride` tokens: row i of a sequence is at position i·stride. A negative stride rotates backwards.
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

    x may be a view of columns. `ramped_frequencies` explains factor, low, high and original.
    """
    frequency_settings = width, theta, factor, low, high, original
    length = sequence // abs(stride)
    angles_Sr = ramped_angles(length, *frequency_settings, x.dtype, x.device, stride) if width else None
    angles = None if angles_Sr is None else turns(angles_Sr, starts, positions)
    return rotate_columns(x, length if positions is None else len(x), heads, first, width, angles, magnitude, scale)


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
    """dy [T, H·C] -> dx [T, H·C]: rotated backwards, with the same factors."""
    settings = sequence, heads, first, width, theta, factor, low, high, original, magnitude, scale
    return rotate(dy, *settings, starts, positions, -stride)


def rotate_columns(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    angles: Tensor | None,
    magnitude: float,
    scale: float,
) -> Tensor:
    """Return x [B·S, H·C] with its columns rotated by the angles of each position, [S, r] or per sequence [B, S, r],
    and scaled as in `rotate`."""
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
    """Return e^(i·pos·f) [S, width/2] with the frequencies f of `ramped_frequencies`, complex `dtype`, or complex FP32
    for BF16; positions are `stride` apart."""
    frequency_r = ramped_frequencies(width, theta, factor, low, high, original)
    phase_Sr = torch.outer(stride * torch.arange(sequence, dtype=torch.float64), frequency_r)
    return torch.polar(torch.ones_like(phase_Sr), phase_Sr).to(device, wide_dtype(dtype).to_complex())


def ramped_frequencies(width: int, theta: float, factor: float, low: float, high: float, original: float) -> Tensor:
    """Return the frequencies of the pairs [width/2], FP64: f·(1 − s) + f / factor·s with f = theta^(−2i/width).

    s rises from 0 at pair i = `low` to 1 at i = `high` (YaRN). If `original` is set, s instead falls from 1 at `low` to
    0 at `high` full turns of the pair within `original` tokens (Llama 3.1).
    """
    frequency_r = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    along_r = original * frequency_r / (2 * pi) if original else torch.arange(width // 2, dtype=torch.float64)
    share_r = ((along_r - low) / (high - low)).clamp(0, 1)
    share_r = 1 - share_r if original else share_r
    return frequency_r * (1 - share_r) + frequency_r / factor * share_r


OPS = (rotate, rotate_dgrad)
