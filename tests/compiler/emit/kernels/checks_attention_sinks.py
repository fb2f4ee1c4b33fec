"""Checks of the gradient of attention sinks in Triton's interpreter: against FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime import ops
from tests.compiler.emit.kernels.interpreted import double, random, run, within

CHECKED = ("bounded_attention_wgrad_",)
Sizes = tuple[int, int, int, int, int]  # B, S, kv heads, query heads per kv head, columns


def operands(dtype: torch.dtype, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """acc, do, o, lse, sinks; of the largest sink, nothing else is in the denominator."""
    B, S, G, group, C = sizes
    H = G * group
    sinks = 3 * random(H, dtype=dtype, seed=5)
    sinks[0], sinks[-1] = 200.0, -torch.inf
    lse = torch.logaddexp(random(B, G, S, group, seed=6), sinks.float().view(1, G, 1, group))
    do, o = (random(B * S, H * C, dtype=dtype, seed=seed) for seed in (7, 8))
    return random(H, seed=9), do, o, lse, sinks


def gradient(dtype: torch.dtype, sizes: Sizes) -> None:
    acc, *args = operands(dtype, sizes)
    do, o, lse, sinks = wide = double(*args)
    expected = acc.double() + ops.OPS["bounded_attention_wgrad"](*wide)
    # Of the weight e^x the argument is rounded twice, times the scale of both numbers that it is the difference of.
    finite = sinks.masked_fill(sinks.isinf(), 0).abs().view(1, *lse.shape[1:2], 1, lse.shape[3])
    weight = (sinks.view(finite.shape) - lse).exp() * (1 + 4 * (finite + lse.abs()))
    delta = (do * o).abs().view(*weight.transpose(1, 2).shape, sizes[-1]).sum(-1)
    magnitude = (weight.transpose(1, 2) * delta).sum((0, 1))
    assert run("bounded_attention_wgrad_", acc, *args) is None
    within(acc, expected, expected.abs() + magnitude.flatten(), len(do) + sizes[-1] + 8)
