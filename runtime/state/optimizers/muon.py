"""Muon: a matrix moves along its momentum with all singular values near 1. Jordan et al., "Muon", 2024.

Weight decay, and the scale that gives updates the root mean square of those of AdamW, are of Liu et al., "Muon is
Scalable for LLM Training", arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from runtime.ops.product import wide_dtype

# x ← a·x + b·x³ + c·x⁵ of every singular value x. The first brings small ones near 1 fast, and then leaves them between
# 0.68 and 1.21; the second has 1 as its limit, and comes near it from there twice as many digits a step.
FAST = 3.4445, -4.7750, 2.0315
EXACT = 2.0, -1.5, 0.5
TINY = 1e-7  # added to a norm: a gradient of zeros moves nothing


def muon(
    master: Tensor,
    gradients: Tensor,
    momentum: Tensor,
    rounded: Tensor | None,
    factor: float,
    rate: float,
    decay_of_momentum: float,
    nesterov: float,
    iterations: float,
    polish: float,
    rms: float,
    decay: float,
    step: int,
    dtype: torch.dtype,
) -> None:
    """Update a matrix and its momentum by `factor` times the gradients. Products are in `dtype`; what they are made of,
    and what is made of them, is FP32 at least. Momentum and matrix are rounded once.

    The root mean square of the elements of U·Vᵀ is 1/√max(rows, columns); the scale takes it to `rms`.
    """
    wide = wide_dtype(master.dtype)
    along = momentum.to(wide, copy=True).mul_(decay_of_momentum).add_(gradients, alpha=factor)
    momentum.copy_(along)
    if nesterov:
        along.mul_(decay_of_momentum).add_(gradients, alpha=factor)
    along = along.div_(torch.linalg.matrix_norm(along).add_(TINY)).to(dtype)
    along = orthogonal(along, int(iterations), int(polish)).to(wide)
    scale = -rate * rms * sqrt(max(master.shape))
    master.copy_(along.mul_(scale).add_(master, alpha=1 - rate * decay))
    if rounded is not None:
        rounded.copy_(master.view(-1))


def orthogonal(x: Tensor, iterations: int, polish: int) -> Tensor:
    """U·S'·Vᵀ of a matrix U·S·Vᵀ of norm 1, with S' near 1: by the iteration of Newton and Schulz, in its dtype."""
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for a, b, c in (*[FAST] * iterations, *[EXACT] * polish):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
