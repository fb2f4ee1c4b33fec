"""The rows of a sequence on each context rank: one chunk from the front, and one at the same distance from the end.

In a causal sequence of 2c chunks, chunk k costs as much attention as k + ½ whole chunks. Rank r of c has the chunks r
and 2c − 1 − r, so that all ranks have the same cost (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2).
There are B sequences of S rows; a rank has B · S / c rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of_rank(rows: Tensor, sequences: int, context: int, rank: int) -> Tensor:
    """rows [B·S, …] in the order of sequences -> rows of a rank, [B·S / c, …]."""
    chunks = rows.unflatten(0, (sequences, 2 * context, -1))
    return torch.stack((chunks[:, rank], chunks[:, 2 * context - 1 - rank]), dim=1).flatten(0, 2)


def sort_by_rank(rows: Tensor, sequences: int, context: int) -> Tensor:
    """rows [B·S, …] in the order of sequences -> rows of rank 0, then of rank 1, and so on."""
    chunks = rows.unflatten(0, (sequences, 2 * context, -1))
    pairs = torch.stack((chunks[:, :context], chunks[:, context:].flip(1)), dim=2)
    return pairs.transpose(0, 1).flatten(0, 3)


def sort_by_sequence(rows: Tensor, sequences: int, context: int) -> Tensor:
    """The result of `sort_by_rank` -> rows in the order of sequences."""
    pairs = rows.unflatten(0, (context, sequences, 2, -1)).transpose(0, 1)
    return torch.cat((pairs[:, :, 0], pairs[:, :, 1].flip(1)), dim=1).flatten(0, 2)
