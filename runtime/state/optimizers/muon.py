"""Muon: a matrix is updated by its momentum with all singular values moved near 1. Jordan et al., "Muon", 2024.

Weight decay, and the scale that gives updates the root mean square of AdamW's, are from Liu et al., "Muon is Scalable
for LLM Training", arXiv 2502.16982, section 2.2.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from runtime.ops.product import wide_dtype

# x ← a·x + b·x³ + c·x⁵ for every singular value x. FAST moves small ones near 1 quickly, then leaves them between 0.68
# and 1.21; EXACT converges to 1 from there, and doubles the number of correct digits in each step.
FAST = 3.4445, -4.7750, 2.0315
EXACT = 2.0, -1.5, 0.5
TINY = 1e-7  # added to a norm, so that a zero gradient gives a zero update


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
    """Update a matrix and its momentum with `factor` times the gradients. Matrix products are in `dtype`, all else in
    FP32 or wider. Momentum and matrix are rounded once.

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
    """Return U·S'·Vᵀ with S' near 1 for a matrix U·S·Vᵀ of norm 1: Newton-Schulz iteration, in the dtype of `x`."""
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for a, b, c in (*[FAST] * iterations, *[EXACT] * polish):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
