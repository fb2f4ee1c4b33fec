"""Random Hadamard transform of the columns of a matrix, in blocks of 16 rows. R rows, C columns.

Both inputs of a weight gradient, dy and x, are multiplied from the left by the same orthogonal matrix H·D: H is the
Hadamard matrix of order 16 divided by 4, D a diagonal of signs, the same in all layers and steps (arXiv 2509.25149,
§4.2). It cancels in dyᵀ·x, and spreads an outlier over its block before quantisation. Rows after the last whole block
are unchanged in both inputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 16
# Fixed: the first 16 bits of the fraction of π, hexadecimal 243F.
SIGNS = tuple(1.0 - 2.0 * (0x243F >> bit & 1) for bit in range(BLOCK))


def hadamard(x_RC: Tensor) -> Tensor:
    """Return H·D·x of each block of 16 rows, FP32."""
    wide_RC = x_RC.to(torch.float32)
    full_rows = wide_RC.shape[0] // BLOCK * BLOCK
    blocks = wide_RC[:full_rows].unflatten(0, (-1, BLOCK))
    turned = torch.matmul(_matrix().to(x_RC.device), blocks).flatten(0, 1)
    return torch.cat((turned, wide_RC[full_rows:]))


@cache
def _matrix() -> Tensor:
    """Return H·D, FP32 [16, 16]."""
    h = torch.ones(1, 1)
    while len(h) < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * torch.tensor(SIGNS) / BLOCK**0.5
