"""Random numbers for stochastic rounding: a hash of seed, step, tensor, row and column, without a generator.

A generator per rank would round differently on every layout of ranks. These numbers depend only on what is rounded: a
`key` holds the seed, the step and the tensor's number, and a row is identified by its fingerprint, a hash of its bits.
Row indices would not work, because they depend on the layout: it determines the order of an expert's rows and the split
of a step into micro-batches. So layouts that compute the same bits round them the same way, micro-batches get different
numbers, and a resumed run gets the numbers it would have had. For a given row, the numbers vary independently of it
over seeds and steps, so its rounding is unbiased.

Hashes are sums and products modulo 2⁶⁴ with SplitMix64's last step (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native import ops
from runtime.ops.native.library import runs_natively

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
BITS = 24


def thresholds(x_RC: Tensor, key: Tensor, salt: int = 0) -> Tensor:
    """Return random numbers [R, C] (FP32) for a tensor, uniform over the multiples of 2⁻²⁴ in [0, 1).

    key: seed, step and tensor (int64 [3]); `salt` distinguishes several roundings of one tensor.
    """
    seed, wide_RC = mix_bits(mix_bits(mix_bits(key[0] * _GOLDEN + salt) + key[1]) + key[2]), x_RC.to(torch.float32)
    return ops.thresholds(wide_RC, int(seed)) if runs_natively(wide_RC) else highest_bits(hash_elements(wide_RC, seed))


def hash_elements(x_RC: Tensor, seed: Tensor) -> Tensor:
    """Return hashes [R, C] (int64) for the elements of a tensor (FP32), by row fingerprint and column."""
    columns_C = mix_bits(torch.arange(1, x_RC.shape[1] + 1, device=x_RC.device) * _GOLDEN)
    bits_RC = x_RC.view(torch.int32)
    fingerprints_R = mix_bits((bits_RC * (columns_C | 1)).sum(-1) ^ seed)
    return mix_bits(fingerprints_R[:, None] + columns_C)


def mix_bits(x: Tensor) -> Tensor:
    """Return a 64-bit hash: each bit of the result depends on every bit of x."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def highest_bits(hashes: Tensor) -> Tensor:
    """Hashes -> numbers in [0, 1), from their highest bits."""
    return _shift_right(hashes, 64 - BITS).to(torch.float32) * 2.0**-BITS


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return x shifted right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
