# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Cross entropy of next-token logits, summed over the valid targets (those ≥ 0), and its gradient; or what a part of a
vocabulary gives to it.

T tokens · V vocabulary. A program owns ROWS whole rows and reads each logit once: the largest so far, and the sum of
exponentials relative to it, go along. Losses of rows are then added up in FP64 by one program, in a fixed order. A
target that is no column makes the loss NaN, and the gradient of its row. One below 0 is void, or in another part.
"""

import torch
import triton
import triton.language as tl

V, BLOCK_V = 4096, 4096
ROWS = 1  # of a tile
LAUNCH = {'num_warps': 4, 'enable_fp_fusion': True}
TOTAL = {'num_warps': 4, 'enable_fp_fusion': True}
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of FP32: finite, so that −∞ less it is −∞ and no NaN


def cross_entropy(logits_TV, targets_T):
    """(loss [], lse_T). Here and below the logits may be a view of some columns of a wider tensor."""
    lse_T, loss_T = _statistics(logits_TV, targets_T)
    loss = torch.empty((), dtype=torch.float32, device=logits_TV.device)
    _total[(1,)](loss_T, loss, len(loss_T), 1024, **TOTAL)
    return loss, lse_T
def cross_entropy_dgrad(dloss, logits_TV, targets_T, lse_T):
    """dlogits_TV = (softmax − onehot) · dloss; zeros in the rows of void targets."""
    return _logit_gradients((dloss,), logits_TV, targets_T, lse_T)
def _statistics(logits_TV, targets_T):
    """lse_T, and of each row its loss, or of a part the logit of its target."""
    assert logits_TV.stride(1) == 1 and logits_TV.shape[1] == V and targets_T.is_contiguous()
    num_rows = logits_TV.shape[0]
    found_T, lse_T = torch.empty(2, num_rows, dtype=torch.float32, device=logits_TV.device)
    grid = (triton.cdiv(num_rows, ROWS),)
    _forward[grid](logits_TV, targets_T, found_T, lse_T, logits_TV.stride(0), num_rows, V, BLOCK_V, ROWS, **LAUNCH)
    return lse_T, found_T


def _logit_gradients(tangents, logits_TV, targets_T, lse_T):
    assert logits_TV.stride(1) == 1 and targets_T.is_contiguous() and lse_T.is_contiguous()
    num_rows = logits_TV.shape[0]
    dlogits_TV = logits_TV.new_empty(num_rows, V)
    grid = (triton.cdiv(num_rows, ROWS),)
    sizes = logits_TV.stride(0), num_rows, V, BLOCK_V, ROWS
    _gradient[grid](*tangents, logits_TV, targets_T, lse_T, dlogits_TV, *sizes, **LAUNCH)
    return dlogits_TV


@triton.jit
def _forward(
    logits_TV, targets_T, found_T, lse_T, stride, num_rows,
    V: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets_T + t, mask=t < num_rows, other=-1)
    known = (target >= 0) & (target < V)
    picked = tl.load(logits_TV + t * stride + target, mask=known, other=0.0).to(tl.float32)
    highest = tl.full((ROWS,), LOWEST, tl.float32)
    parts = tl.zeros((ROWS, BLOCK_V), tl.float32)  # a sum for each column of a block: they meet once, at the end
    for first in tl.range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = (t < num_rows)[:, None] & (v < V)[None, :]
        at = logits_TV + t[:, None] * stride + v[None, :]
        logits = tl.load(at, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
        higher = tl.maximum(highest, tl.max(logits, 1))
        parts = parts * tl.exp(highest - higher)[:, None] + tl.exp(logits - higher[:, None])
        highest = higher
    lse = highest + tl.log(tl.sum(parts, 1))
    found = tl.where(known, lse - picked, tl.where(target < 0, 0.0, float("nan")))
    tl.store(lse_T + t, lse, mask=t < num_rows)
    tl.store(found_T + t, found, mask=t < num_rows)


@triton.jit
def _total(loss_T, loss, num_rows, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for first in tl.range(0, num_rows, BLOCK):
        t = first + tl.arange(0, BLOCK)
        total += tl.load(loss_T + t, mask=t < num_rows, other=0.0).to(tl.float64)
    tl.store(loss, tl.sum(total, 0).to(tl.float32))


@triton.jit
def _gradient(
    dloss,
    logits_TV, targets_T, lse_T, dlogits_TV, stride, num_rows,
    V: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets_T + t, mask=t < num_rows, other=-1)
    lse = tl.load(lse_T + t, mask=t < num_rows, other=0.0)
    scale = tl.where(target < 0, 0.0, tl.where(target < V, tl.load(dloss), float("nan")))
    for first in tl.range(0, V, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = (t < num_rows)[:, None] & (v < V)[None, :]
        at = logits_TV + t[:, None] * stride + v[None, :]
        logits = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        weights = tl.exp(logits - lse[:, None])
        dlogits = tl.where(v[None, :] == target[:, None], weights - 1.0, weights) * scale[:, None]
        at = dlogits_TV + t[:, None] * V + v[None, :]
        tl.store(at, dlogits.to(dlogits_TV.dtype.element_ty), mask=inside, cache_modifier=".cs")
