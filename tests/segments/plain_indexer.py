"""An indexer, attention over what it chooses, and its loss in plain torch: whole sequences, by masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def select_keys(q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int, top_k: int, rate: int) -> Tensor:
    """Choose by masks, in whole sequences with one key for each token."""
    scores = _index_scores(q, k, weights, sequence, heads).detach()
    best = scores.sort(dim=-1, descending=True, stable=True)  # many scores are 0
    kept = torch.where(best.values > -torch.inf, best.indices, -1)[..., :top_k]
    return functional.pad(kept, (0, top_k - kept.shape[-1]), value=-1).flatten(0, 1).to(torch.int32)


def _index_scores(q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int) -> Tensor:
    """[B, S, S], −inf of later keys."""
    q_BSHC, k_BSC = q.reshape(-1, sequence, heads, k.shape[1]), k.reshape(-1, sequence, k.shape[1])
    hits = torch.relu(torch.einsum("bqhc,bkc->bqhk", q_BSHC, k_BSC))
    scores = torch.einsum("bqh,bqhk->bqk", weights.reshape(-1, sequence, heads), hits)
    return scores.masked_fill(torch.ones(sequence, sequence).triu(1).bool(), -torch.inf)


def _is_chosen(chosen: Tensor | None, sequence: int, tokens: int) -> Tensor:
    """[B, S, S]."""
    if chosen is None:
        return torch.ones(sequence, sequence).tril().bool().expand(tokens // sequence, -1, -1)
    onehot = functional.one_hot(torch.where(chosen < 0, sequence, chosen).long(), sequence + 1)
    return onehot.sum(1)[:, :sequence].bool().view(-1, sequence, sequence)


def _latent_weights(
    q: Tensor, kv: Tensor, k_rope: Tensor, chosen: Tensor | None, sequence: int, heads: int, nope: int
) -> Tensor:
    """[B, H, S, S]: what a query gives each key."""
    q_BSHC = q.reshape(-1, sequence, heads, nope + k_rope.shape[1])
    k_BSHN = kv.reshape(-1, sequence, heads, kv.shape[1] // heads)[..., :nope]
    scores = torch.einsum("bqhn,bkhn->bhqk", q_BSHC[..., :nope], k_BSHN)
    scores = scores + torch.einsum("bqhr,bkr->bhqk", q_BSHC[..., nope:], k_rope.reshape(-1, sequence, k_rope.shape[1]))
    hidden = ~_is_chosen(chosen, sequence, len(q))[:, None]
    return torch.softmax((scores / math.sqrt(q_BSHC.shape[3])).masked_fill(hidden, -torch.inf), dim=-1)


def chosen_attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    chosen: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
) -> Tensor:
    weights = _latent_weights(q, kv, k_rope, chosen, sequence, heads, nope)
    v_BSHV = kv.reshape(-1, sequence, heads, nope + value)[..., nope:]
    return torch.einsum("bhqk,bkhv->bqhv", weights, v_BSHV).reshape(len(q), heads * value)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    chosen: Tensor | None,
    sequence: int,
    index_heads: int,
    heads: int,
    nope: int,
) -> Tensor:
    given = (each.detach() for each in (query, kv, k_rope))
    p = _latent_weights(*given, chosen, sequence, heads, nope).mean(dim=1)
    scores = _index_scores(q, k, weights, sequence, index_heads)
    ours = torch.softmax(scores.masked_fill(~_is_chosen(chosen, sequence, len(q)), -torch.inf), dim=-1)
    return torch.where(p > 0, p * torch.log(p / torch.where(p > 0, ours, 1.0)), 0.0).sum()
