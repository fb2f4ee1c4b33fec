"""Attention over chosen keys, and the indexer's loss, query by query, differentiable by torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """Gathers the keys of each query."""
    rows = []
    for t in range(q.shape[0]):
        keys = [t // sequence * sequence + s for s in chosen[t].tolist() if s >= 0]
        p_HK = _attention(q[t], kv[keys], k_rope[keys], heads, nope)
        values_KHV = kv[keys].unflatten(1, (heads, nope + value))[..., nope:]
        rows.append(torch.einsum("hk,khv->hv", p_HK, values_KHV).flatten())
    return torch.stack(rows)


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
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The sum, over queries that see a key, of the divergence of two distributions."""
    B = k.shape[0] // (sequence // rate)
    Q, total = q.shape[0] // B, q.new_zeros(())
    for t in range(q.shape[0]):
        position = t % Q if positions is None else int(positions[t])
        start = 0 if starts is None else int(starts[t])
        visible = range(start, (position + 1) // rate) if chosen is None else [s for s in chosen[t].tolist() if s >= 0]
        keys = [t // Q * (sequence // rate) + s for s in visible]
        if not keys:
            continue
        with torch.no_grad():
            p_K = _attention(query[t], None if kv is None else kv[keys], k_rope[keys], heads, nope).sum(0)
            p_K = p_K / p_K.sum()
        hits_HK = torch.clamp(torch.einsum("hc,kc->hk", q[t].unflatten(0, (index_heads, -1)), k[keys]), min=0)
        ours_K = torch.softmax((weights[t][:, None] * hits_HK).sum(0), dim=0)
        total = total + (p_K * (p_K / ours_K).log()).sum()
    return total


def _attention(q: Tensor, kv_KX: Tensor | None, k_rope_Kr: Tensor, heads: int, nope: int) -> Tensor:
    """The attention of each head of a query to the keys, [heads, keys]."""
    q_HC = q.unflatten(0, (heads, -1))
    scores = q_HC[:, nope:] @ k_rope_Kr.T
    if kv_KX is not None:
        k_nope_KHN = kv_KX.unflatten(1, (heads, -1))[..., :nope]
        scores = torch.einsum("hn,khn->hk", q_HC[:, :nope], k_nope_KHN) + scores
    return torch.softmax(scores / q_HC.shape[1] ** 0.5, dim=1)
