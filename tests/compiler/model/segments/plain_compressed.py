"""The ops of compressed attention in plain torch, for autograd: over whole sequences, with masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def compress(x: Tensor, bias: Tensor, sequence: int, overlap: bool) -> Tensor:
    """A softmax over all tokens of a sequence for every entry, masked to the tokens of the entry."""
    rate, W = bias.shape
    E, C = sequence // rate, W // 2 if overlap else W
    values, gates = (part.unflatten(0, (-1, sequence)) for part in x.split(W, dim=1))
    gates = gates + bias.repeat(E + 1, 1)[:sequence]
    window_S, entry_E1 = torch.arange(sequence) // rate, torch.arange(E)[:, None]
    series = [(0, entry_E1 == window_S + 1), (1, entry_E1 == window_S)] if overlap else [(0, entry_E1 == window_S)]
    logits = [
        gates[:, None, :, half * C : (half + 1) * C].masked_fill(~inside[None, :, :, None], -torch.inf)
        for half, inside in series
    ]
    shares_BEsC = torch.cat(logits, dim=2).softmax(dim=2)
    rows_BsC = torch.cat([values[..., half * C : (half + 1) * C] for half, _ in series], dim=1)
    return torch.einsum("besc,bsc->bec", shares_BEsC, rows_BsC).flatten(0, 1)


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
    """One softmax over all keys, all entries and a column of sinks, with a mask."""
    S, E = sequence, sequence // rate
    q_BSHC = q.unflatten(0, (-1, S)).unflatten(2, (heads, -1))
    keys_BKC = torch.cat([kv.unflatten(0, (-1, S)), entries.unflatten(0, (len(q_BSHC), E))], dim=1)
    seen_SS = torch.ones(S, S, dtype=torch.bool).tril().triu(1 - window)
    before_SE = torch.arange(E) < (torch.arange(S)[:, None] + 1) // rate
    seen_BSK = torch.cat([seen_SS, before_SE], dim=1).repeat(len(q_BSHC), 1, 1)
    if chosen is not None:
        picked_TE = functional.one_hot(chosen.long() + 1, E + 1).sum(1)[:, 1:] > 0
        seen_BSK[:, :, S:] &= picked_TE.view(-1, S, E)
    scores_BHSK = torch.einsum("bshc,bkc->bhsk", q_BSHC, keys_BKC) * q_BSHC.shape[3] ** -0.5
    scores_BHSK = scores_BHSK.masked_fill(~seen_BSK[:, None], -torch.inf)
    sinks_H = torch.full((heads,), -torch.inf, dtype=q.dtype) if sinks is None else sinks
    sinks_BHS1 = sinks_H[:, None, None].expand(len(q_BSHC), -1, S, 1)
    share_BHSK = torch.cat([scores_BHSK, sinks_BHS1], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bhsk,bkc->bshc", share_BHSK, keys_BKC).flatten(2).flatten(0, 1)


def block_linear(x: Tensor, w: Tensor) -> Tensor:
    groups = x.shape[1] // w.shape[1]
    return torch.einsum("tgk,gnk->tgn", x.unflatten(1, (groups, -1)), w.unflatten(0, (groups, -1))).flatten(1)


def unweighted_rmsnorm(x: Tensor, heads: int, eps: float) -> Tensor:
    return functional.rms_norm(x.unflatten(1, (heads, -1)), (x.shape[1] // heads,), eps=eps).flatten(1)
