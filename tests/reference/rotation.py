"""Rotary position embedding of the reference: which frequencies pairs have, and how they turn.

Su et al., "RoFormer", arXiv 2104.09864; YaRN, arXiv 2309.00071; Llama 3.1 as its authors compute it.
Shapes: B sequences · S tokens · H heads · R columns of a head · P = R/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.reference.config import Rope, Scaling


def frequencies(rope: Rope, width: int) -> Tensor:
    """Angles by which each of width/2 pairs turns from one position to the next, float64."""
    plain_P = rope.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaling = rope.scaling
    if scaling is None:
        return plain_P
    if scaling.kind == "linear":
        return plain_P / scaling.factor
    if scaling.kind == "llama3":  # as its authors compute it: by wavelengths
        wave_P = 2 * math.pi / plain_P
        smooth_P = (scaling.original / wave_P - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        found_P = (1 - smooth_P) * plain_P / scaling.factor + smooth_P * plain_P
        found_P = torch.where(wave_P < scaling.original / scaling.high_freq_factor, plain_P, found_P)
        return torch.where(wave_P > scaling.original / scaling.low_freq_factor, plain_P / scaling.factor, found_P)

    def pair(turns: float) -> float:
        """The pair that turns so often in the original context."""
        return width * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp_P = ((torch.arange(width // 2) - low) / ((high - low) or 0.001)).clamp(0, 1).to(torch.float64)
    return plain_P / scaling.factor * ramp_P + plain_P * (1 - ramp_P)


def grown(factor: float, slope: float) -> float:
    """YaRN's 0.1·slope·ln(factor) + 1."""
    return 0.1 * slope * math.log(factor) + 1


def amplitude(scaling: Scaling | None) -> float:
    """What YaRN multiplies sines and cosines by."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.factor, scaling.mscale) / grown(scaling.factor, scaling.mscale_all_dim)
    return grown(scaling.factor, 1)


def rotate_last(x_BSHR: Tensor, rope: Rope | None, stride: int = 1) -> Tensor:
    """`rotate` for a partly rotated head whose first columns do not change; rows are `stride` positions
    apart."""
    if rope is None:
        return x_BSHR
    fixed, turning = x_BSHR.split([x_BSHR.shape[3] - (rope.width or x_BSHR.shape[3]), rope.width or x_BSHR.shape[3]], 3)
    return torch.cat([fixed, rotate(turning, rope, stride)], dim=3)


def rotate(x_BSHR: Tensor, rope: Rope | None, stride: int = 1) -> Tensor:
    """RoPE on interleaved pairs: at position p, (x_2i, x_2i+1) rotates by p times the pair's frequency; in a partly
    rotated head, the last columns do not change. Rows are `stride` positions apart."""
    if rope is None:
        return x_BSHR
    S, R = x_BSHR.shape[1], rope.width or x_BSHR.shape[3]
    position_S = stride * torch.arange(S, dtype=torch.float64)
    angle_SP = torch.outer(position_S, frequencies(rope, R))
    cos_SHP = amplitude(rope.scaling) * angle_SP.cos()[:, None, :].to(x_BSHR.dtype)
    sin_SHP = amplitude(rope.scaling) * angle_SP.sin()[:, None, :].to(x_BSHR.dtype)
    even, odd = x_BSHR[..., 0:R:2], x_BSHR[..., 1:R:2]
    turned = torch.stack([even * cos_SHP - odd * sin_SHP, even * sin_SHP + odd * cos_SHP], dim=-1)
    return torch.cat([turned.flatten(-2), x_BSHR[..., R:]], dim=-1)
