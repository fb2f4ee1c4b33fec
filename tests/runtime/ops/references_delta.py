"""Slow references of linear attention, token by token, differentiable by torch's autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.runtime.ops.references_attention import by_document


def convolve(x_TN: Tensor, w_NJ: Tensor, sequence: int, starts: Tensor | None = None) -> Tensor:
    """Row by row and tap by tap."""
    if starts is not None:
        return by_document(lambda x, size: convolve(x, w_NJ, size), (x_TN,), starts, sequence)
    taps, rows = w_NJ.shape[1], []
    for row in range(x_TN.shape[0]):
        sum_N = torch.zeros_like(x_TN[0])
        for back in range(min(taps, row % sequence + 1)):
            sum_N = sum_N + w_NJ[:, taps - 1 - back] * x_TN[row - back]
        rows.append(sum_N / (1 + torch.exp(-sum_N)))
    return torch.stack(rows)


def log_decay(logit_TN: Tensor, a_H: Tensor) -> Tensor:
    heads = zip(a_H, logit_TN.chunk(len(a_H), dim=1), strict=True)
    return torch.cat([-torch.exp(a) * torch.log(1 + torch.exp(logit_TW)) for a, logit_TW in heads], dim=1)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    sequence: int,
    key_heads: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Head by head, one token after the other."""
    if starts is not None:
        alone = lambda *tensors: delta_rule(*tensors, key_heads)  # noqa: E731
        return by_document(alone, (q, k, v, beta, decay), starts, sequence)
    H, K = beta.shape[1], q.shape[1] // key_heads
    heads = []
    for head in range(H):
        shared = head // (H // key_heads)
        q_TK, k_TK = (x[:, shared * K : (shared + 1) * K] for x in (q, k))
        q_TK, k_TK = (x / (x.square().sum(dim=1, keepdim=True) + 1e-6) ** 0.5 for x in (q_TK, k_TK))
        v_TV, g_TW = v.chunk(H, dim=1)[head], decay.chunk(H, dim=1)[head]
        rows = []
        for token in range(q.shape[0]):
            if token % sequence == 0:
                state_KV = torch.zeros(K, v_TV.shape[1], dtype=v.dtype)
            state_KV = torch.exp(g_TW[token])[:, None] * state_KV
            wrong_V = v_TV[token] - k_TK[token] @ state_KV
            state_KV = state_KV + torch.outer(k_TK[token], wrong_V) / (1 + torch.exp(-beta[token, head]))
            rows.append(q_TK[token] @ state_KV / K**0.5)
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1)
