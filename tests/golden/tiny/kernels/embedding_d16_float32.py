# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Rows of a table by token, and the gradient of the table.

T tokens · V rows of the table · D columns. A token below 0 is in another part of the table: its row is zeros, and it
has no gradient. The gradient first sorts the tokens, stably: a program finds the places of SORTED tokens by comparing
them with all others, T² comparisons in all. That is a launch of microseconds up to 16,384 tokens and as long as moving
the rows at 65,536. Then the rows of equal tokens lie side by side in `order_T`, and the program at the first of them
adds all, a tile of rows at a time: no atomics, and equal bits from run to run.
"""

import torch
import triton
import triton.language as tl

D = 16
SORT = {'SORTED': 32, 'OTHERS': 64, 'num_warps': 8, 'enable_fp_fusion': True}
MOVE = {'ROWS': 128, 'BLOCK_D': 16, 'num_warps': 4, 'enable_fp_fusion': True}
ADD = {'ROWS': 64, 'BLOCK_D': 16, 'num_warps': 4, 'enable_fp_fusion': True}


def embedding(tokens_T, w_VD):
    """h_TD."""
    assert tokens_T.is_contiguous() and w_VD.is_contiguous() and w_VD.shape[1] == D
    num_tokens = tokens_T.shape[0]
    h_TD = w_VD.new_empty(num_tokens, D)
    grid = (triton.cdiv(num_tokens, MOVE["ROWS"]) * triton.cdiv(D, MOVE["BLOCK_D"]),)
    _gather[grid](tokens_T, w_VD, h_TD, num_tokens, D, **MOVE)
    return h_TD


def embedding_wgrad_(acc_VD, dh_TD, tokens_T):
    """acc_VD[token] += dh of every token."""
    assert acc_VD.is_contiguous() and dh_TD.is_contiguous() and tokens_T.is_contiguous() and acc_VD.shape[1] == D
    num_tokens = tokens_T.shape[0]
    order_T = torch.empty(num_tokens, dtype=torch.int32, device=tokens_T.device)
    equal_T = torch.empty_like(order_T)
    _sort[(triton.cdiv(num_tokens, SORT["SORTED"]),)](tokens_T, order_T, equal_T, num_tokens, **SORT)
    grid = (num_tokens * triton.cdiv(D, ADD["BLOCK_D"]),)
    _add_rows[grid](acc_VD, dh_TD, tokens_T, order_T, equal_T, D, **ADD)


@triton.jit
def _gather(tokens_T, w_VD, h_TD, num_tokens, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    t = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (t < num_tokens)[:, None] & (d < D)[None, :]
    token = tl.load(tokens_T + t, mask=t < num_tokens, other=0)
    here = inside & (token >= 0)[:, None]
    row = tl.load(w_VD + token[:, None] * D + d[None, :], mask=here, other=0.0, cache_modifier=".cg")
    tl.store(h_TD + t[:, None] * D + d[None, :], row, mask=inside)


@triton.jit
def _sort(tokens_T, order_T, equal_T, num_tokens, SORTED: tl.constexpr, OTHERS: tl.constexpr):
    """order_T: tokens by number, then by place; equal_T: how many equal ones ≥ 0 begin at each place of it, else 0."""
    t = tl.program_id(0) * SORTED + tl.arange(0, SORTED)
    mine = tl.load(tokens_T + t, mask=t < num_tokens, other=0).to(tl.int32)
    place = tl.zeros((SORTED,), tl.int32)
    earlier = tl.zeros((SORTED,), tl.int32)
    equal = tl.zeros((SORTED,), tl.int32)
    for first in tl.range(0, num_tokens, OTHERS):
        i = first + tl.arange(0, OTHERS)
        token = tl.load(tokens_T + i, mask=i < num_tokens, other=0).to(tl.int32)
        is_equal = (token[None, :] == mine[:, None]) & (i < num_tokens)[None, :]
        is_less = (token[None, :] < mine[:, None]) & (i < num_tokens)[None, :]
        place += tl.sum(is_less.to(tl.int32), 1)
        equal += tl.sum(is_equal.to(tl.int32), 1)
        earlier += tl.sum((is_equal & (i[None, :] < t[:, None])).to(tl.int32), 1)
    place += earlier
    tl.store(order_T + place, t, mask=t < num_tokens)
    tl.store(equal_T + place, tl.where((earlier == 0) & (mine >= 0), equal, 0), mask=t < num_tokens)


@triton.jit
def _add_rows(acc_VD, dh_TD, tokens_T, order_T, equal_T, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows of equal tokens, where they begin; nothing elsewhere."""
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    place = tl.program_id(0) // parts
    equal = tl.load(equal_T + place)
    if equal > 0:
        d = (tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
        total = tl.zeros((ROWS, BLOCK_D), acc_VD.dtype.element_ty)
        for first in tl.range(0, equal, ROWS):
            i = first + tl.arange(0, ROWS)
            t = tl.load(order_T + place + i, mask=i < equal, other=0).to(tl.int64)
            inside = (i < equal)[:, None] & (d < D)
            dh = tl.load(dh_TD + t[:, None] * D + d, mask=inside, other=0.0, cache_modifier=".cg")
            total += dh.to(total.dtype)
        at = acc_VD + tl.load(tokens_T + tl.load(order_T + place)) * D + d
        acc = tl.load(at, mask=d < D, other=0.0) + tl.sum(total, 0)[None, :]
        tl.store(at, acc, mask=d < D)
