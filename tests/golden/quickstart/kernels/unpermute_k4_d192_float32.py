# Launches are chosen for sm_90: NVIDIA H100 and H200. Other GPUs run it, not as fast as they could.
"""Rows in the order of experts back to their tokens, and the gradients of moving rows there and back.

T tokens · K choices of a token · S = T·K rows · D columns. Row j holds choice order_S[j] = t·K + k; place_TK is the
inverse of that, made in a first launch. The rows of a token are added in FP32, in the order of k, and rounded once:
no atomics, and equal bits from run to run.
"""

import torch
import triton
import triton.language as tl

K, D = 4, 192
B = 0  # scales of a row; 0: none
ROWS = 8  # tokens of a program
INVERT = {'BLOCK_S': 256, 'num_warps': 4, 'enable_fp_fusion': True}
COPY = {'BLOCK_B': 1, 'BLOCK_D': 256, 'num_warps': 4, 'enable_fp_fusion': True}
SUM = {'BLOCK_D': 256, 'num_warps': 4, 'enable_fp_fusion': True}
def unpermute(y_SD, order_S, top_k):
    """y_TD."""
    return _summed(y_SD, _invert(order_S, top_k))


def unpermute_add(h_TD, shared_TD, y_SD, order_S, top_k):
    """(h + shared) + unpermute(y), rounded after every addition and after the sum over choices."""
    assert h_TD.is_contiguous() and (shared_TD is None or shared_TD.is_contiguous())
    return _summed(y_SD, _invert(order_S, top_k), h_TD, shared_TD)


def unpermute_dgrad(dy_TD, order_S, top_k):
    """dy_SD."""
    assert dy_TD.is_contiguous() and dy_TD.shape[1] == D
    num_tokens, place_TK = dy_TD.shape[0], _invert(order_S, top_k)
    dy_SD = dy_TD.new_empty(num_tokens * K, D)
    _copy[_grid(num_tokens)](dy_TD, dy_SD, None, None, place_TK, 0, 0, num_tokens, K, D, B, ROWS, **COPY)
    return dy_SD


def permute_dgrad(drows_SD, order_S, top_k):
    """dx_TD."""
    return _summed(drows_SD, _invert(order_S, top_k))


def permute_dgrad_add(drows_SD, order_S, top_k, add_TD, more_TD):
    """(add + permute_dgrad(drows)) + more, rounded after every addition and after the sum over choices."""
    assert add_TD.is_contiguous() and (more_TD is None or more_TD.is_contiguous())
    return _summed(drows_SD, _invert(order_S, top_k), add_TD, None, more_TD)


def _summed(y_SD, place_TK, h_TD=None, shared_TD=None, more_TD=None):
    assert y_SD.is_contiguous() and y_SD.shape[1] == D
    num_tokens = place_TK.shape[0]
    y_TD = y_SD.new_empty(num_tokens, D)
    _sum[_grid(num_tokens)](h_TD, shared_TD, y_SD, place_TK, more_TD, y_TD, num_tokens, K, D, ROWS, **SUM)
    return y_TD


def _grid(num_tokens):
    """The parts of a row are neighbours, so that a row is read as a whole at about one time."""
    return (triton.cdiv(num_tokens, ROWS) * triton.cdiv(D, COPY["BLOCK_D"]),)


def _invert(order_S, top_k):
    """place_TK: the row of each choice."""
    assert order_S.is_contiguous() and top_k == K
    num_rows = order_S.shape[0]
    place_TK = torch.empty(num_rows // K, K, dtype=torch.int32, device=order_S.device)
    _inverse[(triton.cdiv(num_rows, INVERT["BLOCK_S"]),)](order_S, place_TK, num_rows, **INVERT)
    return place_TK


@triton.jit
def _inverse(order_S, place_TK, num_rows, BLOCK_S: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = j < num_rows
    tl.store(place_TK + tl.load(order_S + j, mask=inside), j.to(tl.int32), mask=inside)
@triton.jit
def _sum(
    h_TD, shared_TD, y_SD, place_TK, more_TD, y_TD, num_tokens,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_TD.dtype.element_ty
    t, d, inside = _tile(num_tokens, D, ROWS, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place_TK + t * K + k, mask=t < num_tokens, other=0).to(tl.int64)
        total += tl.load(y_SD + row[:, None] * D + d, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    at = t[:, None] * D + d
    if h_TD is not None:
        h = tl.load(h_TD + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if shared_TD is not None:
            shared = tl.load(shared_TD + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
            h = (h + shared).to(dtype).to(tl.float32)
        total = h + total.to(dtype).to(tl.float32)
    if more_TD is not None:
        more = tl.load(more_TD + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        total = total.to(dtype).to(tl.float32) + more
    tl.store(y_TD + at, total.to(dtype), mask=inside)


@triton.jit
def _copy(
    x_TD, rows_SD, scales_TB, scales_SB, place_TK, stride_t, stride_b, num_tokens,
    K: tl.constexpr, D: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Every row of x to the K rows that are its token's; the first program of a row moves its scales as well."""
    t, d, inside = _tile(num_tokens, D, ROWS, BLOCK_D)
    x = tl.load(x_TD + t[:, None] * D + d, mask=inside, cache_modifier=".cg")
    for k in tl.static_range(K):
        row = tl.load(place_TK + t * K + k, mask=t < num_tokens, other=0).to(tl.int64)
        tl.store(rows_SD + row[:, None] * D + d, x, mask=inside, cache_modifier=".cs")


@triton.jit
def _tile(num_tokens, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens and columns of a program, and which of them there are; no mask of columns where the blocks fit."""
    parts: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    t = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = (tl.program_id(0) % parts * BLOCK_D + tl.arange(0, BLOCK_D))[None, :]
    inside = (t < num_tokens)[:, None]
    if D % BLOCK_D != 0:
        inside = inside & (d < D)
    return t, d, inside
