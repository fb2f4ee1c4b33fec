"""Multi-head latent attention over the keys that each query has chosen. DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556.

The letters are those of `mla_attention`: T queries in B sequences of S keys, H heads, [nope | rope] wide, that come
rotated. K keys are chosen by a query (`select_keys`), all of them of its past and of its document.

Blocks of queries are multiplied with all keys in front of the last that any of them has chosen, and what is not chosen
is hidden. On a CPU and with torch this is faster than to gather keys: a query of DeepSeek-V3.2 would read 2048 keys and
values of 128 heads, 0.3 GB, for products that take as long as 5 MB do. Gathering by a sum of rows would besides give
other bits each time on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.ops.causal import columns, split_heads
from runtime.ops.indexer import BLOCK_BYTES, ELSEWHERE, is_chosen
from runtime.ops.mla_attention import join_gradients, split_inputs
from runtime.ops.wide import wide


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
    [T, H·value], lse_BHQ, the logarithm of the denominator of softmax(q·k/√(nope+rope)), FP32 at least."""
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
    """Heads of a sequence, some of its queries, the keys in front of the last that one has chosen, and which of these
    each query has not."""
    (P, Q), S = q_PQC.shape[:2], k_PSC.shape[1]
    size = max(1, BLOCK_BYTES.get(q_PQC.device.type, ELSEWHERE) // (heads * S * q_PQC.itemsize))
    for b in range(P // heads):
        for first in range(0, Q, size):
            rows = slice(first, min(first + size, Q))
            of_block = chosen[b * Q + rows.start : b * Q + rows.stop]
            keys = int(of_block.max()) + 1
            yield slice(b * heads, (b + 1) * heads), rows, slice(0, keys), ~is_chosen(of_block, keys)


OPS = (chosen_attention, chosen_attention_dgrad)
