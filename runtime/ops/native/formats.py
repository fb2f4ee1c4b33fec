"""Formats of tensors with scales in C++: what `runtime.ops.formats` and `stochastic` compute element by element, where
`library.takes` their operands. Tensors are [.., R, C], and tiles (rows, columns) of at most 128 columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.ops.native.library import call

Tile = tuple[int, int]
WIDEST = 128


def magnitudes(x: Tensor, tile: Tile, nan: bool) -> Tensor:
    """The largest magnitudes (FP32) of tiles; NaN is left out, or with `nan` counts as an infinity."""
    most = x.new_empty(_tiles(x.shape, tile))
    call("magnitudes", torch.float32, *_sizes(x.shape), x, *tile, nan, most)
    return most


def encode(x: Tensor, tile: Tile, inverse: Tensor, threshold: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The codes of numbers (FP32) times the number of their tile: E4M3, or pairs of E2M1 in bytes."""
    *experts, R, C = x.shape
    assert inverse.shape == _tiles(x.shape, tile) and inverse.dtype == torch.float32, (inverse.shape, inverse.dtype)
    assert threshold is None or (threshold.shape == x.shape and threshold.dtype == torch.float32), threshold
    codes = x.new_empty((*experts, R, -(-C // 2) if dtype == torch.uint8 else C), dtype=dtype)
    call("encode", dtype, *_sizes(x.shape), x, *tile, inverse, threshold, codes)
    return codes


def decode(codes: Tensor, tile: Tile, scales: Tensor) -> Tensor:
    """The numbers (FP32) of codes times the scales (FP32) of their tiles."""
    *experts, R, C = codes.shape
    y = codes.new_empty((*experts, R, 2 * C if codes.dtype == torch.uint8 else C), dtype=torch.float32)
    assert scales.shape == _tiles(y.shape, tile) and scales.dtype == torch.float32, (scales.shape, scales.dtype)
    call("decode", codes.dtype, *_sizes(y.shape), codes, *tile, scales, y)
    return y


def thresholds(x_RC: Tensor, seed: int) -> Tensor:
    """Random numbers [R, C] (FP32) of a tensor's elements (FP32), by the hash `seed` of its key."""
    y_RC = torch.empty_like(x_RC, memory_format=torch.contiguous_format)
    call("thresholds", torch.float32, *x_RC.shape, x_RC, seed, y_RC)
    return y_RC


def _sizes(shape: torch.Size) -> tuple[int, int, int]:
    """How many matrices there are, their rows and columns."""
    *experts, R, C = shape
    return math.prod(experts), R, C


def _tiles(shape: torch.Size, tile: Tile) -> torch.Size:
    *experts, R, C = shape
    assert tile[1] <= WIDEST, tile
    return torch.Size((*experts, -(-R // tile[0]), -(-C // tile[1])))
