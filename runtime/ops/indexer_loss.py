"""What an indexer is trained by: how far the softmax of its scores is from the attention that it chooses keys for.

DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, §2.1: Σ_t KL(p(t) ‖ softmax(I(t))), p the mean of the heads' attention,
over all keys that a query sees, or over those that it has chosen; a query that sees none has no loss. p is a target:
attention gets no gradient of it. The scores I and the letters are those of `indexer`; attention has its heads, each
[nope | rope] wide, its keys already rotated.

The gradients of the indexer are made with the loss, from the same products: dI = softmax(I) − p. They are kept for the
backward, which has no product left to do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.causal import split_heads
from runtime.ops.indexer import blocks, index_scores, is_chosen, products
from runtime.ops.wide import wide


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, H·C], k [B·S, C], weights [T, H] of the indexer; query, kv, k_rope of `mla_attention`, rotated; chosen
    int32 [T, K] of `select_keys`, or none: all keys -> loss [], summed over the queries; and of a tangent of 1 the
    gradients of q, k and weights, shaped like these.

    Where a key stands for `rate` tokens, k and k_rope have a row for each so many. With nope = 0 there is no kv: the
    keys of attention are all k_rope.
    """
    loss = wide(q[:0]).new_zeros(())
    dq, dk, dweights = (torch.zeros_like(wide(x), memory_format=torch.contiguous_format) for x in (q, k, weights))
    query_BHQC, key_BHSC = _queries_and_keys(query, kv, k_rope, sequence // rate, heads, nope)
    Q = query_BHQC.shape[2]
    for block in blocks(q, k, max(index_heads, heads), sequence, rate, starts, positions):
        b, first = divmod(block.rows.start, Q)
        rows = slice(first, first + block.rows.stop - block.rows.start)
        hidden_RL = block.hidden() if chosen is None else ~is_chosen(chosen[block.rows], block.keys)
        none_R1 = hidden_RL.all(dim=1, keepdim=True)
        hidden_RL = hidden_RL & ~none_R1  # a softmax over no key is no number
        scores_HRL = torch.bmm(query_BHQC[b, :, rows], key_BHSC[b, :, : block.keys].mT)
        p_RL = scores_HRL.masked_fill_(hidden_RL, -torch.inf).softmax(dim=-1).mean(dim=0)
        ours_RL = index_scores(q[block.rows], k[block.key_rows], weights[block.rows])
        log_RL = ours_RL.masked_fill_(hidden_RL, -torch.inf).log_softmax(dim=-1)
        nats_RL = torch.xlogy(p_RL, p_RL) - p_RL * log_RL.masked_fill(hidden_RL, 0.0)
        loss += nats_RL.masked_fill(none_R1, 0.0).sum()
        dscores_RL = log_RL.exp_().sub_(p_RL).masked_fill_(none_R1, 0.0)
        _add_gradients(block.rows, dscores_RL, (q, k, weights), (dq, dk, dweights), block.key_rows)
    return loss, dq.to(q.dtype), dk.to(k.dtype), dweights.to(weights.dtype)


def _add_gradients(
    rows: slice, dscores_RL: Tensor, given: tuple[Tensor, ...], gradients: tuple[Tensor, ...], keys: slice
) -> None:
    """Add what a block has of the gradients of q, k and weights."""
    (q, k, weights), (dq, dk, dweights) = given, gradients
    q_RX, k_LC, weights_RH = q[rows], k[keys], weights[rows]
    hits_RHL = products(q_RX, k_LC).relu_()
    dweights[rows] = torch.bmm(hits_RHL, dscores_RL[:, :, None])[..., 0]
    dhits_RHL = (wide(weights_RH)[:, :, None] * dscores_RL[:, None]).mul_(hits_RHL > 0)
    dhits_ML = dhits_RHL.flatten(0, 1)
    dq[rows] = torch.mm(dhits_ML, wide(k_LC)).view(q_RX.shape)
    dk[keys].addmm_(dhits_ML.mT, wide(q_RX).reshape(-1, k_LC.shape[1]))


def _queries_and_keys(
    query: Tensor, kv: Tensor | None, k_rope: Tensor, sequence: int, heads: int, nope: int
) -> tuple[Tensor, Tensor]:
    """Queries, scaled by 1/√C, and whole keys, S of each sequence and head: [B, H, Q, C], [B, H, S, C]."""
    keys = split_heads(wide(k_rope), sequence, 1).expand(-1, heads, -1, -1)
    if kv is not None:
        keys = torch.cat((split_heads(wide(kv), sequence, heads)[..., :nope], keys), dim=-1)
    query_BHQC = split_heads(wide(query), query.shape[0] // len(keys), heads)
    return query_BHQC * query_BHQC.shape[3] ** -0.5, keys


def indexer_loss_dgrad(
    dloss: Tensor, q_gradient: Tensor, k_gradient: Tensor, weights_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dloss [], the gradients that were made with the loss -> dq, dk, dweights."""
    gradients = (q_gradient, k_gradient, weights_gradient)
    dq, dk, dweights = ((wide(each) * dloss).to(each.dtype) for each in gradients)
    return dq, dk, dweights


OPS = (indexer_loss, indexer_loss_dgrad)
