"""An indexer, attention over the chosen keys, and its loss in plain torch: on whole sequences, with masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def select_keys(q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int, top_k: int, rate: int) -> Tensor:
    """Choose by masks, in whole sequences."""
    scores = _index_scores(q, k, weights, sequence, heads, rate).detach()
    best = scores.sort(dim=-1, descending=True, stable=True)  # many scores are 0
    indices = torch.where(best.values > -torch.inf, best.indices, -1)[..., :top_k]
    return functional.pad(indices, (0, top_k - indices.shape[-1]), value=-1).flatten(0, 1).to(torch.int32)


def _index_scores(q: Tensor, k: Tensor, weights: Tensor, sequence: int, heads: int, rate: int = 1) -> Tensor:
    """[B, S, S // rate], −inf of keys that do not end before the query does."""
    q_BSHC, k_BSC = q.reshape(-1, sequence, heads, k.shape[1]), k.reshape(-1, sequence // rate, k.shape[1])
    hits = torch.relu(torch.einsum("bqhc,bkc->bqhk", q_BSHC, k_BSC))
    scores = torch.einsum("bqh,bqhk->bqk", weights.reshape(-1, sequence, heads), hits)
    return scores.masked_fill(~_is_past(sequence, rate), -torch.inf)


def _is_past(sequence: int, rate: int) -> Tensor:
    """[S, S // rate]."""
    ends = rate * (torch.arange(sequence // rate) + 1)
    return ends <= torch.arange(sequence)[:, None] + 1


def _is_chosen(chosen: Tensor | None, sequence: int, tokens: int, rate: int = 1) -> Tensor:
    """[B, S, S // rate]."""
    keys = sequence // rate
    if chosen is None:
        return _is_past(sequence, rate).expand(tokens // sequence, -1, -1)
    onehot = functional.one_hot(torch.where(chosen < 0, keys, chosen).long(), keys + 1)
    return onehot.sum(1)[:, :keys].bool().view(-1, sequence, keys)


def _latent_scores(q: Tensor, kv: Tensor | None, k_rope: Tensor, keys: int, heads: int, nope: int) -> Tensor:
    """[B, H, S, keys], by the width of a query."""
    k_BKR = k_rope.reshape(-1, keys, k_rope.shape[1])
    q_BSHC = q.reshape(len(k_BKR), -1, heads, nope + k_rope.shape[1])
    scores = torch.einsum("bqhr,bkr->bhqk", q_BSHC[..., nope:], k_BKR)
    if kv is not None:
        k_BKHN = kv.reshape(-1, keys, heads, kv.shape[1] // heads)[..., :nope]
        scores = scores + torch.einsum("bqhn,bkhn->bhqk", q_BSHC[..., :nope], k_BKHN)
    return scores / math.sqrt(q_BSHC.shape[3])


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
    scores = _latent_scores(q, kv, k_rope, sequence, heads, nope)
    hidden = ~_is_chosen(chosen, sequence, len(q))[:, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    v_BSHV = kv.reshape(-1, sequence, heads, nope + value)[..., nope:]
    return torch.einsum("bhqk,bkhv->bqhv", weights, v_BSHV).reshape(len(q), heads * value)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    query: Tensor,
    kv: Tensor | None,
    k_rope: Tensor,
    chosen: Tensor | None,
    sequence: int,
    index_heads: int,
    heads: int,
    nope: int,
    rate: int,
) -> Tensor:
    """Return the sum over the queries that see a key."""
    operands = query.detach(), None if kv is None else kv.detach(), k_rope.detach()
    visible = _is_chosen(chosen, sequence, len(q), rate)
    sees_any = visible.any(dim=-1)
    theirs = _latent_scores(*operands, sequence // rate, heads, nope).transpose(1, 2)[sees_any]
    p = torch.softmax(theirs.masked_fill(~visible[sees_any][:, None], -torch.inf), dim=-1).mean(dim=1)
    scores = _index_scores(q, k, weights, sequence, index_heads, rate)[sees_any]
    ours = torch.softmax(scores.masked_fill(~visible[sees_any], -torch.inf), dim=-1)
    return torch.where(p > 0, p * torch.log(p / torch.where(p > 0, ours, 1.0)), 0.0).sum()
