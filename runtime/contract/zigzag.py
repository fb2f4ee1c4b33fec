"""Which rows of a sequence a context rank has: a chunk from the front, and one as far from the end.

A causal sequence in 2c chunks costs chunk k as much attention as k + ½ whole chunks. Rank r of c has the chunks r and
2c − 1 − r, so that each rank computes as much as any other (Llama Team, "The Llama 3 Herd of Models", 2024, section
3.3.2). B sequences of S rows; the rows of a rank are B times S / c.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_rank(rows: Tensor, sequences: int, context: int, rank: int) -> Tensor:
    """rows [B·S, …] in the order of sequences -> those of a rank, [B·S / c, …]."""
    chunks = rows.unflatten(0, (sequences, 2 * context, -1))
    return torch.stack((chunks[:, rank], chunks[:, 2 * context - 1 - rank]), dim=1).flatten(0, 2)


def by_rank(rows: Tensor, sequences: int, context: int) -> Tensor:
    """rows [B·S, …] in the order of sequences -> those of rank 0, then those of rank 1, and so on."""
    chunks = rows.unflatten(0, (sequences, 2 * context, -1))
    pairs = torch.stack((chunks[:, :context], chunks[:, context:].flip(1)), dim=2)
    return pairs.transpose(0, 1).flatten(0, 3)


def in_order(rows: Tensor, sequences: int, context: int) -> Tensor:
    """What `by_rank` gave -> rows in the order of sequences."""
    pairs = rows.unflatten(0, (context, sequences, 2, -1)).transpose(0, 1)
    return torch.cat((pairs[:, :, 0], pairs[:, :, 1].flip(1)), dim=1).flatten(0, 2)
