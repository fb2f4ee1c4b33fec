"""Slow references of the ops of compressed attention, differentiable by torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def compress(x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> Tensor:
    """Entry by entry and column by column: each number is a mean with weights e^gate."""
    rate, W = bias.shape
    C = W // 2 if overlap else W
    entries = []
    for of_sequence in x.split(sequence):
        for entry in range(sequence // rate):
            rows = of_sequence[entry * rate : (entry + 1) * rate]
            values, gates = rows[:, W - C : W], rows[:, 2 * W - C :] + bias[:, W - C :]
            if overlap and entry:
                before = of_sequence[(entry - 1) * rate : entry * rate]
                values = torch.cat((before[:, :C], values))
                gates = torch.cat((before[:, W : W + C] + bias[:, :C], gates))
            weights = gates.exp()
            entries.append((weights * values).sum(0) / weights.sum(0))
    return torch.stack(entries) if entries else x.new_zeros(0, C)


def compressed_attention(
    q: Tensor,
    kv: Tensor,
    entries: Tensor,
    chosen: Tensor | None,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    window: int,
    rate: int,
) -> Tensor:
    """Query by query and head by head, over the visible keys and entries."""
    C, of_sequence = q.shape[1] // heads, sequence // rate
    outputs = []
    for t, q_X in enumerate(q):
        b, position = divmod(t, sequence)
        visible = range((position + 1) // rate) if chosen is None else [e for e in chosen[t].tolist() if e >= 0]
        keys = kv[b * sequence + max(0, position + 1 - window) : t + 1]
        keys = torch.cat([keys, *(entries[b * of_sequence + e][None] for e in visible)])
        for head, q_C in enumerate(q_X.split(C)):
            weights = torch.exp(keys @ q_C / C**0.5)
            total = weights.sum() if sinks is None else weights.sum() + sinks[head].exp()
            outputs.append(weights @ keys / total)
    return torch.stack(outputs).reshape(q.shape)


def block_linear(x: Tensor, w: Tensor) -> Tensor:
    """With one block-diagonal matrix."""
    groups = x.shape[1] // w.shape[1]
    return x @ torch.block_diag(*w.chunk(groups)).T


def unweighted_rmsnorm(x: Tensor, heads: int, eps: float) -> Tensor:
    """Head by head."""
    return torch.cat([x_TC / torch.sqrt((x_TC**2).mean(1, keepdim=True) + eps) for x_TC in x.chunk(heads, 1)], dim=1)
