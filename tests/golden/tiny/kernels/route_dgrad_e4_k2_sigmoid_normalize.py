# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""The gradient of gate weights to the router's logits; the choice of experts has none.

T tokens · E experts · K choices of a token. In FP32; a program has ROWS whole rows, so every sum stays inside it.
"""

import torch
import triton
import triton.language as tl

E, K = 4, 2
SOFTMAX, NORMALIZE = False, True
LAUNCH = {'BLOCK_E': 4, 'BLOCK_K': 2, 'ROWS': 256, 'num_warps': 4, 'enable_fp_fusion': True}


def route_dgrad(dgate_TK, logits_TE, expert_TK, softmax, normalize, scale):
    """dlogits_TE."""
    assert dgate_TK.is_contiguous() and logits_TE.is_contiguous() and expert_TK.is_contiguous()
    assert logits_TE.shape[1] == E and expert_TK.shape[1] == K
    num_tokens = logits_TE.shape[0]
    dlogits_TE = torch.empty_like(logits_TE)
    grid = (triton.cdiv(num_tokens, LAUNCH["ROWS"]),)
    _gradient[grid](dgate_TK, logits_TE, expert_TK, dlogits_TE, num_tokens, scale, E, K, SOFTMAX, NORMALIZE, **LAUNCH)
    return dlogits_TE


@triton.jit
def _gradient(
    dgate_TK, logits_TE, expert_TK, dlogits_TE, num_tokens, scale,
    E: tl.constexpr, K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """With s the scores and g = dgate · scale: ds = (g − Σ g·s / Σ s) / Σ s if normalised, sums over the chosen; then
    dlogits = ds · s · (1 − s) of a sigmoid, s · (ds − Σ ds·s) of a softmax, with ds = 0 for what is not chosen."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    e, k = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    chosen, inside = (t < num_tokens) & (k < K), (t < num_tokens) & (e < E)
    expert = tl.load(expert_TK + t * K + k, mask=chosen, other=E)
    grad = tl.load(dgate_TK + t * K + k, mask=chosen, other=0.0) * scale
    logit = tl.load(logits_TE + t * E + expert, mask=chosen, other=float("-inf"))
    if SOFTMAX:
        logits = tl.load(logits_TE + t * E + e, mask=inside, other=float("-inf"))
        largest = tl.max(logits, 1)[:, None]
        total = tl.sum(tl.exp(logits - largest), 1)[:, None]
        score = tl.where(chosen, tl.exp(logit - largest) / total, 0.0)
    else:
        score = tl.sigmoid(logit)
    if NORMALIZE:
        chosen_total = tl.sum(score, 1)[:, None] + 1e-20
        grad = (grad - tl.sum(grad * score, 1)[:, None] / chosen_total) / chosen_total
    grad *= score
    if SOFTMAX:
        dlogits = tl.exp(logits - largest) / total * -tl.sum(grad, 1)[:, None]
    else:
        grad *= 1.0 - score
        dlogits = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for choice in tl.static_range(K):
        of_choice = tl.sum(tl.where(k == choice, expert, 0), 1)[:, None]
        dlogits += tl.where(e == of_choice, tl.sum(tl.where(k == choice, grad, 0.0), 1)[:, None], 0.0)
    tl.store(dlogits_TE + t * E + e, dlogits, mask=inside)
