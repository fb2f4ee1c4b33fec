"""The indexer of sparse attention: it scores keys and chooses those that a query attends to.

DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556. The score of key s for query t is
I(t, s) = Σ_h weights(t, h) · ReLU(q(t, h) · k(s)), with one key for all heads. T queries in B sequences · H indexer
heads · C columns per head · L keys per sequence · K chosen keys.

A key stands for `rate` tokens: a query at position t sees the keys before (t + 1) // rate; at rate 1 this is the causal
mask. With `starts` it sees no key that stands for a token before its document.

Scores are computed in blocks of a few queries, against the keys that any of them sees, in at least FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops.causal import columns, split_heads
from runtime.ops.mla_attention import join_gradients, split_inputs
from runtime.ops.product import wide

BLOCK_BYTES = {"cpu": 2**22}  # of the products of all heads with all keys; larger elsewhere, for fewer launches
ELSEWHERE = 2**28


def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    sequence: int,
    heads: int,
    top_k: int,
    rate: int,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """q [T, H·C], k [B·L, C], weights [T, H] -> chosen int32 [T, K]: indices of keys within the sequence, ascending;
    L = sequence // rate. Rows of queries that see fewer than K keys end with −1. Ties go to the earlier key.

    `starts` int32 [T]: where the document of each query starts in its sequence. With `positions` int32 [T] the queries
    are those at these positions, the same number for each sequence.
    """
    chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for block in blocks(q, k, heads, sequence, rate, starts, positions):
        scores_RL = index_scores(q[block.rows], k[block.key_rows], weights[block.rows])
        first_R1, end_R1 = block.first_R1, block.end_R1
        scores_RL.masked_fill_(block.hidden(), -torch.inf)
        order_RK = scores_RL.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
        rank_K = torch.arange(order_RK.shape[1], device=q.device)
        unused = block.keys  # not the index of a key, and sorts after all of them
        order_RK = order_RK.masked_fill(rank_K >= end_R1 - first_R1, unused).sort(dim=1).values
        chosen[block.rows, : order_RK.shape[1]] = order_RK.masked_fill(order_RK == unused, -1).to(torch.int32)
    return chosen


def index_scores(q_RX: Tensor, k_LC: Tensor, weights_RH: Tensor) -> Tensor:
    """q [R, H·C], k_LC, weights_RH -> I_RL, at least FP32."""
    return _weigh_hits(products(q_RX, k_LC).relu_(), weights_RH)


def products(q_RX: Tensor, k_LC: Tensor) -> Tensor:
    """Return q·k of each head, [R, H, L]."""
    q_MC = wide(q_RX).reshape(-1, k_LC.shape[1])
    return torch.mm(q_MC, wide(k_LC).mT).unflatten(0, (q_RX.shape[0], -1))


def _weigh_hits(hits_RHL: Tensor, weights_RH: Tensor) -> Tensor:
    return torch.bmm(wide(weights_RH)[:, None], hits_RHL)[:, 0]


def is_chosen(chosen_RK: Tensor, keys: int) -> Tensor:
    """Return a mask [R, keys] of the keys that each query has chosen."""
    place_RK = chosen_RK.long().where(chosen_RK >= 0, keys)
    marks = torch.zeros((len(chosen_RK), keys + 1), dtype=torch.bool, device=chosen_RK.device)
    return marks.scatter_(1, place_RK, True)[:, :keys]


# ---------------------------------------------------------------- blocks
@dataclass(frozen=True)
class IndexBlock:
    """Some queries of one sequence, and the keys that any of them sees."""

    rows: slice
    first_key: int  # row in k of the sequence's first key
    keys: int  # number of keys from there
    first_R1: Tensor  # index within the sequence of the first key that each query sees
    end_R1: Tensor  # index after the last one

    @property
    def key_rows(self) -> slice:
        """The rows of the keys in k."""
        return slice(self.first_key, self.first_key + self.keys)

    def hidden(self) -> Tensor:
        """Return a mask [R, keys] of the keys that each query does not see."""
        key_L = torch.arange(self.keys, device=self.end_R1.device)
        return (key_L >= self.end_R1) | (key_L < self.first_R1)


def blocks(
    q: Tensor,
    k: Tensor,
    heads: int,
    sequence: int,
    rate: int,
    starts: Tensor | None,
    positions: Tensor | None,
) -> Iterator[IndexBlock]:
    """Yield blocks of all queries, except those that are known to see no key."""
    keys = sequence // rate
    if not keys:
        return
    B = k.shape[0] // keys
    Q = q.shape[0] // B
    size = max(1, BLOCK_BYTES.get(q.device.type, ELSEWHERE) // (heads * keys * wide(q[:0]).itemsize))
    for first in range(0, Q, size):
        for b in range(B):
            rows = slice(b * Q + first, b * Q + min(first + size, Q))
            position_R = torch.arange(rows.start - b * Q, rows.stop - b * Q, device=q.device)
            last = rows.stop - b * Q - 1
            if positions is not None:
                position_R = positions[rows].long()
                last = int(position_R.max()) if q.is_cpu else sequence - 1  # without a wait for the device
            first_R = torch.zeros_like(position_R) if starts is None else (starts[rows].long() + rate - 1) // rate
            end_R = torch.maximum((position_R + 1) // rate, first_R)
            if num_visible := min(keys, (last + 1) // rate):
                yield IndexBlock(rows, b * keys, num_visible, first_R[:, None], end_R[:, None])


# --- The indexer's loss: the divergence between the softmax of its scores and the attention it chooses keys for
#
# DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, §2.1: Σ_t KL(p(t) ‖ softmax(I(t))), with p the mean over the heads of
# the attention, over all keys that a query sees or over those it has chosen. A query that sees no key has no loss. p is
# a constant: attention gets no gradient from this loss. Scores I and letters are as above; the attention has its own
# number of heads, each [nope | rope] wide, and its keys are already rotated.
#
# The gradients of the indexer are computed along with the loss, from the same products: dI = softmax(I) − p. They are
# stored, so the backward only scales them.


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
    int32 [T, K] from `select_keys`, or None for all keys -> loss [], summed over the queries, and the gradients of q, k
    and weights for a dloss of 1, shaped like these.

    k and k_rope have one row per `rate` tokens. With nope = 0, kv is None: the keys of attention are k_rope alone.
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
        hidden_RL = hidden_RL & ~none_R1  # a softmax over no keys would be NaN
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
    rows: slice, dscores_RL: Tensor, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...], keys: slice
) -> None:
    """Add a block's contribution to the gradients of q, k and weights."""
    (q, k, weights), (dq, dk, dweights) = inputs, gradients
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
    """Return queries, scaled by 1/√C, [B, H, Q, C], and keys with both parts, S per sequence and head, [B, H, S, C]."""
    keys = split_heads(wide(k_rope), sequence, 1).expand(-1, heads, -1, -1)
    if kv is not None:
        keys = torch.cat((split_heads(wide(kv), sequence, heads)[..., :nope], keys), dim=-1)
    query_BHQC = split_heads(wide(query), query.shape[0] // len(keys), heads)
    return query_BHQC * query_BHQC.shape[3] ** -0.5, keys


def indexer_loss_dgrad(
    dloss: Tensor, q_gradient: Tensor, k_gradient: Tensor, weights_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dloss [], the gradients that were computed with the loss -> dq, dk, dweights."""
    gradients = (q_gradient, k_gradient, weights_gradient)
    dq, dk, dweights = ((wide(gradient) * dloss).to(gradient.dtype) for gradient in gradients)
    return dq, dk, dweights


# --- Multi-head latent attention over the keys each query has chosen. DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556
#
# Letters as in `mla_attention`: T queries in B sequences of S keys, H heads, [nope | rope] wide, already rotated. Each
# query has chosen K keys (`select_keys`), all of them from its past and its document.
#
# A block of queries is multiplied with all keys up to the last that any of them has chosen; keys not chosen are masked.
# With torch on a CPU this is faster than gathering keys: a query of DeepSeek-V3.2 would read 2048 keys and values of
# 128 heads, 0.3 GB, for products that take as long as reading 5 MB. And the gradient of a gather, a scatter-add of
# rows, is not deterministic on a GPU.


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
) -> tuple[Tensor, Tensor]:
    """q [T, H·(nope+rope)], kv [B·S, H·(nope+value)], k_rope [B·S, rope], chosen int32 [T, K], −1 for no key -> o
    [T, H·value], lse_BHQ, the logarithm of the denominator of softmax(q·k/√(nope+rope)), in at least FP32."""
    q_PQC, k_PSC, v_PSV = split_inputs(wide(q), wide(kv), wide(k_rope), sequence, heads, nope, None)
    o_PQV, lse_PQ = q_PQC.new_empty((*q_PQC.shape[:2], value)), q_PQC.new_empty(q_PQC.shape[:2])
    for p, rows, keys, hidden_RS in _blocks(chosen, q_PQC, k_PSC, heads):
        scores = torch.bmm(q_PQC[p, rows], k_PSC[p, keys].mT).masked_fill_(hidden_RS, -torch.inf)
        lse_PQ[p, rows] = scores.logsumexp(dim=-1)
        weights = scores.sub_(lse_PQ[p, rows, None]).exp_()
        o_PQV[p, rows] = torch.bmm(weights, v_PSV[p, keys])
    return columns(o_PQV.to(q.dtype), heads), lse_PQ.unflatten(0, (-1, heads))


def chosen_attention_dgrad(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    o: Tensor,
    lse_BHQ: Tensor,
    chosen: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·value], the forward's inputs and results -> dq, dkv, dk_rope, shaped like q, kv, k_rope."""
    dtype = q.dtype
    do, q, kv, k_rope, o = (wide(x) for x in (do, q, kv, k_rope, o))
    q_PQC, k_PSC, v_PSV = split_inputs(q, kv, k_rope, sequence, heads, nope, None)
    do_PQV = split_heads(do, q_PQC.shape[1], heads).flatten(0, 1)
    delta_PQ = (do_PQV * split_heads(o, q_PQC.shape[1], heads).flatten(0, 1)).sum(dim=-1)
    lse_PQ = lse_BHQ.flatten(0, 1)
    dq_PQC, dk_PSC, dv_PSV = torch.empty_like(q_PQC), torch.zeros_like(k_PSC), torch.zeros_like(v_PSV)
    for p, rows, keys, hidden_RS in _blocks(chosen, q_PQC, k_PSC, heads):
        scores = torch.bmm(q_PQC[p, rows], k_PSC[p, keys].mT).masked_fill_(hidden_RS, -torch.inf)
        weights = scores.sub_(lse_PQ[p, rows, None]).exp_()
        dscores = torch.bmm(do_PQV[p, rows], v_PSV[p, keys].mT).sub_(delta_PQ[p, rows, None]).mul_(weights)
        dv_PSV[p, keys].baddbmm_(weights.mT, do_PQV[p, rows])
        dk_PSC[p, keys].baddbmm_(dscores.mT, q_PQC[p, rows])
        dq_PQC[p, rows] = torch.bmm(dscores, k_PSC[p, keys])
    dq, dkv, dk_rope = join_gradients(dq_PQC, dk_PSC, dv_PSV, heads, nope, None)
    return dq.to(dtype), dkv.to(dtype), dk_rope.to(dtype)


def _blocks(chosen: Tensor, q_PQC: Tensor, k_PSC: Tensor, heads: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Yield, for each block of queries, the heads of its sequence, its query rows, keys that include all that
    they have chosen, and a mask of those that each query has not chosen."""
    (P, Q), S = q_PQC.shape[:2], k_PSC.shape[1]
    size = max(1, BLOCK_BYTES.get(q_PQC.device.type, ELSEWHERE) // (heads * S * q_PQC.itemsize))
    for b in range(P // heads):
        for first in range(0, Q, size):
            rows = slice(first, min(first + size, Q))
            block_chosen = chosen[b * Q + rows.start : b * Q + rows.stop]
            keys = int(block_chosen.max()) + 1 if chosen.is_cpu else S  # without a wait for the device
            yield slice(b * heads, (b + 1) * heads), rows, slice(0, keys), ~is_chosen(block_chosen, keys)


OPS = (
    select_keys,
    indexer_loss,
    indexer_loss_dgrad,
    chosen_attention,
    chosen_attention_dgrad,
)
