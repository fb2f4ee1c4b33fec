"""Random numbers of stochastic rounding: a hash of seed, step, tensor, row and column, and nothing drawn.

A generator that is asked for the n-th number of a rank would round differently on every layout of ranks. These numbers
depend on what is rounded: a `key` has the seed, the step and a number of the tensor, and a row is known by its
fingerprint, a hash of its bits. Its index would differ with the layout: rows of an expert come in an order that the
ranks decide, and a micro-batch is a part of a step that they decide, too. So layouts that compute the same bits round
them the same way, micro-batches get numbers of their own, and a run that is resumed gets those it would have had. Given
a row, its numbers are independent of it over seeds and steps, so its rounding has no bias.

Hashes are sums and products modulo 2⁶⁴ with SplitMix64's last step (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import ops
from runtime.ops.native.library import takes

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 24


def thresholds(x_RC: Tensor, key: Tensor, salt: int = 0) -> Tensor:
    """Numbers [R, C] (FP32) of a tensor, uniform over the multiples of 2⁻²⁴ in [0, 1).

    key: seed, step and tensor (int64 [3]); `salt` tells apart roundings of one tensor.
    """
    seed, wide_RC = mixed(mixed(mixed(key[0] * _GOLDEN + salt) + key[1]) + key[2]), x_RC.to(torch.float32)
    return ops.thresholds(wide_RC, int(seed)) if takes(wide_RC) else top(hashed(wide_RC, seed))


def hashed(x_RC: Tensor, seed: Tensor) -> Tensor:
    """The hashes [R, C] (int64) of a tensor's elements (FP32) by their row and column."""
    columns_C = mixed(torch.arange(1, x_RC.shape[1] + 1, device=x_RC.device) * _GOLDEN)
    bits_RC = x_RC.view(torch.int32)
    fingerprints_R = mixed((bits_RC * (columns_C | 1)).sum(-1) ^ seed)
    return mixed(fingerprints_R[:, None] + columns_C)


def mixed(x: Tensor) -> Tensor:
    """The hash of 64 bits: each bit of the result depends on each of x."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def top(hashes: Tensor) -> Tensor:
    """Hashes -> numbers in [0, 1), of their highest bits."""
    return _shifted(hashes, 64 - BITS).to(torch.float32) * 2.0**-BITS


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x shifted to the right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
