"""Random Hadamard transform of the columns of a matrix, in blocks of 16 rows. R rows, C columns.

Both inputs of a weight gradient, dy and x, are multiplied from the left by the same orthogonal matrix H·D: H is the
Hadamard matrix of 16 over 4, D a diagonal of signs, the same in all layers and all steps (arXiv 2509.25149, §4.2). It
cancels in dyᵀ·x, and spreads an outlier over its block before that is quantised. Rows after the last whole block stay
as they are, in both inputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 16
# Drawn once: the first bits of the fraction of π, in hexadecimal 243F.
SIGNS = tuple(1.0 - 2.0 * (0x243F >> bit & 1) for bit in range(BLOCK))


def hadamard(x_RC: Tensor) -> Tensor:
    """H·D·x of each block of 16 rows, FP32."""
    wide_RC = x_RC.to(torch.float32)
    whole = wide_RC.shape[0] // BLOCK * BLOCK
    blocks = wide_RC[:whole].unflatten(0, (-1, BLOCK))
    turned = torch.matmul(_matrix().to(x_RC.device), blocks).flatten(0, 1)
    return torch.cat((turned, wide_RC[whole:]))


@cache
def _matrix() -> Tensor:
    """H·D / 4."""
    h = torch.ones(1, 1)
    while len(h) < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * torch.tensor(SIGNS) / BLOCK**0.5
