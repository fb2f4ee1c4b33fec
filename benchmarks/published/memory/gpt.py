"""The layers of GPT-3 as Megatron-LM computes them without FlashAttention, for specs of runs that did.

Source: NVIDIA/Megatron-LM, megatron/core/transformer; their memory: arXiv 2205.05198, §4.1. Attention weights are kept
for the backward before and after dropout, and dropout keeps a mask of a byte per element. Modules draw no random
numbers, so a mask is computed from the values; it has as many bytes as a random one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

KEPT = 0.9  # of the elements, by dropout


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Dropout: a mask of x's shape is kept for the backward."""
    return torch.where(x < KEPT, x / KEPT, torch.zeros_like(x))


class Attention(nn.Module):
    """[sequences, sequence, hidden] → [sequences, sequence, hidden]. `head_dim`: width of a head."""

    head_dim: int

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x_BSD.shape
        q, k, v = (
            part.view(batch, sequence, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x_BSD).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5
        later = torch.ones(sequence, sequence, dtype=torch.bool, device=x_BSD.device).triu(1)
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        mixed = (dropped(weights) @ v).transpose(1, 2).reshape(batch, sequence, hidden)
        return dropped(self.out(mixed))


class Attention96(Attention):
    """Heads of 96: GPT 1.5B."""

    head_dim = 96


class Attention128(Attention):
    """Heads of 128."""

    head_dim = 128


class Dense(nn.Module):
    """[tokens, hidden] → [tokens, hidden]: GELU of 4 × hidden."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return dropped(self.down(functional.gelu(self.up(x_TD))))
