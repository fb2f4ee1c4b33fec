"""Ops in C++, with the names, arguments and results of those in `runtime.ops`, for operands that
`library.runs_natively`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runtime.ops.native.library import call

# --- Scaled formats in C++: the elementwise parts of `runtime.ops.formats` and `stochastic`, for operands that
# `library.runs_natively`
#
# Tensors are [.., R, C], and tiles (rows, columns) of at most 128 columns.

Tile = tuple[int, int]
WIDEST = 128


def magnitudes(x: Tensor, tile: Tile, nan: bool) -> Tensor:
    """Return the largest magnitude (FP32) of each tile. NaN is skipped, or with `nan` counts as infinity."""
    largest = x.new_empty(_format_tiles(x.shape, tile))
    call("magnitudes", torch.float32, *_sizes(x.shape), x, *tile, nan, largest)
    return largest


def encode(x: Tensor, tile: Tile, inverse: Tensor, threshold: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the codes of numbers (FP32) times the `inverse` of their tile: E4M3, or E2M1 packed two to a byte."""
    *experts, R, C = x.shape
    assert inverse.shape == _format_tiles(x.shape, tile) and inverse.dtype == torch.float32, (
        inverse.shape,
        inverse.dtype,
    )
    assert threshold is None or (threshold.shape == x.shape and threshold.dtype == torch.float32), threshold
    codes = x.new_empty((*experts, R, -(-C // 2) if dtype == torch.uint8 else C), dtype=dtype)
    call("encode", dtype, *_sizes(x.shape), x, *tile, inverse, threshold, codes)
    return codes


def decode(codes: Tensor, tile: Tile, scales: Tensor) -> Tensor:
    """Return the numbers (FP32) of codes times the scales (FP32) of their tiles."""
    *experts, R, C = codes.shape
    y = codes.new_empty((*experts, R, 2 * C if codes.dtype == torch.uint8 else C), dtype=torch.float32)
    assert scales.shape == _format_tiles(y.shape, tile) and scales.dtype == torch.float32, (scales.shape, scales.dtype)
    call("decode", codes.dtype, *_sizes(y.shape), codes, *tile, scales, y)
    return y


def thresholds(x_RC: Tensor, seed: int) -> Tensor:
    """Return random numbers [R, C] (FP32) for a tensor's elements (FP32). `seed`: the hash of its key."""
    y_RC = torch.empty_like(x_RC, memory_format=torch.contiguous_format)
    call("thresholds", torch.float32, *x_RC.shape, x_RC, seed, y_RC)
    return y_RC


def _sizes(shape: torch.Size) -> tuple[int, int, int]:
    """Return the number of matrices, their rows and columns."""
    *experts, R, C = shape
    return math.prod(experts), R, C


def _format_tiles(shape: torch.Size, tile: Tile) -> torch.Size:
    *experts, R, C = shape
    assert tile[1] <= WIDEST, tile
    return torch.Size((*experts, -(-R // tile[0]), -(-C // tile[1])))


# --- E4M3 ops in C++, with the names, arguments and results of those in `runtime.ops`, for operands that
# `library.runs_natively`
#
# Scales may be stored by rows or by columns; returned scales are stored as `quantise` says.

E4M3 = torch.float8_e4m3fn
TILE = 128


def quantise(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    q_RC, s_BR = _results(*x_RC.shape)
    call("quantise", x_RC.dtype, *x_RC.shape, x_RC, pow2, q_RC, s_BR)
    return q_RC, s_BR.t()


def quantise_columns(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    R, C = x_RC.shape
    q_CR, s_BC = _results(C, R)
    call("quantise_columns", x_RC.dtype, R, C, x_RC, pow2, q_CR, s_BC)
    return q_CR, s_BC.t()


def quantise_blocks(w_NK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor]:
    *experts, N, K = w_NK.shape
    q_NK, q_KN = w_NK.new_empty(w_NK.shape, dtype=E4M3), w_NK.new_empty((*experts, K, N), dtype=E4M3)
    s = w_NK.new_empty((*experts, _tiles(N), _tiles(K)), dtype=torch.float32)
    call("quantise_blocks", w_NK.dtype, *(experts or (1,)), N, K, w_NK, pow2, q_NK, s, q_KN)
    return q_NK, s, q_KN


def requantise(q_RC: Tensor, s_RB: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    R, C = _check(q_RC, s_RB)
    q_CR, s_BC = _results(C, R)
    call("requantise", E4M3, R, C, q_RC, s_RB, pow2, q_CR, s_BC)
    return q_CR, s_BC.t()


def dequantise(q_RC: Tensor, s_RB: Tensor) -> Tensor:
    """q_RC, s_RB in row tiles -> x_RC (FP32)."""
    R, C = _check(q_RC, s_RB)
    x_RC = torch.empty((R, C), dtype=torch.float32)
    call("dequantise", E4M3, R, C, q_RC, s_RB, x_RC)
    return x_RC


def linear_fp8(x_RK: Tensor, xs_RB: Tensor, w: Tensor, ws: Tensor, offsets_G: Tensor | None = None) -> Tensor:
    """Return the product with w_NK, or with w_ENK of several experts, each over its group of rows."""
    (R, K), (*experts, N, _) = _check(x_RK, xs_RB), w.shape
    assert w.shape[-1] == K and ws.dtype == torch.float32, (x_RK.shape, w.shape, ws.dtype)
    assert ws.shape == (*experts, _tiles(N), _tiles(K)), (ws.shape, w.shape)
    y_RN = torch.empty((R, N), dtype=torch.bfloat16)
    groups = _groups(offsets_G, R)
    call("linear", E4M3, groups, offsets_G, R, *(experts or (1,)), N, K, x_RK, xs_RB, w, ws, y_RN)
    return y_RN


def linear_fp8_wgrad_(
    acc: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor, offsets_G: Tensor | None = None
) -> None:
    """acc_NK += dw_NK, or acc_ENK of several experts."""
    (N, R), (K, same_R) = _check(dy_NR, dys_NB), _check(x_KR, xs_KB)
    *experts, _, _ = acc.shape
    assert same_R == R and acc.shape == (*experts, N, K), (acc.shape, dy_NR.shape, x_KR.shape)
    assert acc.is_contiguous() and acc.dtype == torch.float32, (acc.stride(), acc.dtype)
    groups = _groups(offsets_G, R)
    call("linear_wgrad", E4M3, groups, offsets_G, R, *(experts or (1,)), N, K, dy_NR, dys_NB, x_KR, xs_KB, acc)


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _check(q_RC: Tensor, s_RB: Tensor) -> tuple[int, int]:
    """Check data and scales in row tiles; return rows and columns."""
    R, C = q_RC.shape
    assert s_RB.shape == (R, _tiles(C)) and s_RB.dtype == torch.float32, (q_RC.shape, s_RB.shape, s_RB.dtype)
    return R, C


def _results(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return uninitialized data, and scales [tiles per row, rows]."""
    return torch.empty((rows, columns), dtype=E4M3), torch.empty((_tiles(columns), rows), dtype=torch.float32)


def _groups(offsets_G: Tensor | None, rows: int) -> int:
    """Return the number of groups: 1 without offsets."""
    if offsets_G is None:
        return 1
    ends = [0, *offsets_G.tolist()]
    assert offsets_G.dtype == torch.int32 and ends == sorted(ends) and ends[-1] == rows, (ends, rows)
    return len(ends) - 1


# --- ops


def mla_attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    angles_Sr: Tensor,
    heads: int,
    nope: int,
    value: int,
    starts: Tensor | None,
    peaks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op of this name in C++. It takes the angles of each position instead of theta.

    Without `starts`, q may have only the rows of the last positions, the same number for each sequence; o has the same
    rows. `peaks_H`, if given, is raised to the largest logit of each head.
    """
    S, rope = angles_Sr.shape[0], _pairs(k_rope.shape[1], angles_Sr)
    B = kv.shape[0] // S
    Q = q.shape[0] // max(B, 1)
    o, lse_BHS = q.new_empty((q.shape[0], heads * value)), _fp32(q, B, heads, Q)
    inputs = q, kv, k_rope, angles_Sr, _int32(starts)
    call("mla_attention", q.dtype, B, S, S - Q, heads, nope, rope, value, *inputs, o, lse_BHS, peaks_H)
    return o, lse_BHS


def mla_attention_dgrad(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    o: Tensor,
    lse_BHS: Tensor,
    angles_Sr: Tensor,
    heads: int,
    nope: int,
    value: int,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    S = angles_Sr.shape[0]
    sizes = (q.shape[0] // S, S, heads, nope, _pairs(k_rope.shape[1], angles_Sr), value)
    results = _like(q), _like(kv), _like(k_rope)
    inputs = do, q, kv, k_rope, o, lse_BHS, angles_Sr, _int32(starts)
    call("mla_attention_dgrad", q.dtype, *sizes, *inputs, *results)
    return results


def gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles_Sr: Tensor,
    heads: int,
    kv_heads: int,
    starts: Tensor | None,
    peaks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op of this name in C++, like `mla_attention`."""
    S = angles_Sr.shape[0]
    B = k.shape[0] // S
    Q = q.shape[0] // max(B, 1)
    o, lse = _like(q), _fp32(q, B, kv_heads, Q, heads // kv_heads)
    C, inputs = _pairs(q.shape[1] // heads, angles_Sr), (q, k, v, angles_Sr, _int32(starts))
    call("gqa_attention", q.dtype, B, S, S - Q, heads, kv_heads, C, *inputs, o, lse, peaks_H)
    return o, lse


def gqa_attention_dgrad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    angles_Sr: Tensor,
    heads: int,
    kv_heads: int,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    S = angles_Sr.shape[0]
    sizes = (q.shape[0] // S, S, heads, kv_heads, _pairs(q.shape[1] // heads, angles_Sr))
    results = _like(q), _like(k), _like(v)
    call("gqa_attention_dgrad", q.dtype, *sizes, do, q, k, v, o, lse, angles_Sr, _int32(starts), *results)
    return results


def mla_spans(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    angles_Sr: Tensor,
    sizes: tuple[int, int, int],
    spans_N3: Tensor,
    first: Tensor,
    second: Tensor,
) -> Tensor:
    """`mla_attention` of the next tokens of several sequences -> o. `sizes`: heads, nope, value.

    spans_N3: slot, earlier tokens and next tokens of each sequence; rows beyond theirs get zeros. `first` and `second`
    keep kv and k_rope of all tokens of the sequence in each slot: [slots, S, width].
    """
    heads, nope, value = sizes
    rope, S = _pairs(k_rope.shape[1], angles_Sr), first.shape[1]
    _check_spans(spans_N3, len(q), first, second)
    o = q.new_zeros((q.shape[0], heads * value))
    inputs = q, kv, k_rope, angles_Sr, first, second
    call("mla_spans", q.dtype, len(spans_N3), spans_N3, S, heads, nope, rope, value, *inputs, o)
    return o


def gqa_spans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles_Sr: Tensor,
    sizes: tuple[int, int],
    spans_N3: Tensor,
    first: Tensor,
    second: Tensor,
) -> Tensor:
    """`gqa_attention` of the next tokens of several sequences, like `mla_spans`. `sizes`: heads of queries, of keys."""
    heads, kv_heads = sizes
    C, S = _pairs(q.shape[1] // heads, angles_Sr), first.shape[1]
    _check_spans(spans_N3, len(q), first, second)
    o = q.new_zeros(q.shape)
    inputs = q, k, v, angles_Sr, first, second
    call("gqa_spans", q.dtype, len(spans_N3), spans_N3, S, heads, kv_heads, C, *inputs, o)
    return o


def _check_spans(spans_N3: Tensor, rows: int, first: Tensor, second: Tensor) -> None:
    slots, S = first.shape[:2]
    assert spans_N3.dtype == torch.int32 and second.shape[:2] == (slots, S), (spans_N3.dtype, second.shape)
    assert first.is_contiguous() and second.is_contiguous() and first.dtype == second.dtype, (first, second)
    slot_N, start_N, count_N = spans_N3.numpy().T
    assert (slot_N < slots).all() and (start_N + count_N <= S).all() and count_N.sum() <= rows, spans_N3


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert w_D.shape == x_TD.shape[1:], (x_TD.shape, w_D.shape)
    y_TD, rstd_T = _like(x_TD), _fp32(x_TD, x_TD.shape[0])
    call("rmsnorm", x_TD.dtype, *x_TD.shape, x_TD, None, w_D, eps, None, y_TD, rstd_T)
    return y_TD, rstd_T


def add_rmsnorm(h_TD: Tensor, x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    assert h_TD.shape == x_TD.shape and w_D.shape == x_TD.shape[1:], (h_TD.shape, x_TD.shape, w_D.shape)
    sum_TD, y_TD, rstd_T = _like(x_TD), _like(x_TD), _fp32(x_TD, x_TD.shape[0])
    call("rmsnorm", x_TD.dtype, *x_TD.shape, h_TD, x_TD, w_D, eps, sum_TD, y_TD, rstd_T)
    return sum_TD, y_TD, rstd_T


def rmsnorm_dgrad(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor, add_TD: Tensor | None = None) -> Tensor:
    """Run the op of this name in C++, or `rmsnorm_dgrad_add`."""
    assert dy_TD.shape == x_TD.shape and w_D.shape == x_TD.shape[1:], (dy_TD.shape, x_TD.shape, w_D.shape)
    assert add_TD is None or (add_TD.shape == x_TD.shape and add_TD.dtype == x_TD.dtype), add_TD
    dx_TD = _like(x_TD)
    call("rmsnorm_dgrad", x_TD.dtype, *x_TD.shape, dy_TD, x_TD, w_D, rstd_T, add_TD, dx_TD)
    return dx_TD


def permuted_rmsnorm_dgrad_add(
    drows_SD: Tensor | None,
    order_S: Tensor | None,
    top_k: int,
    other_TD: Tensor,
    more_TD: Tensor | None,
    x_TD: Tensor,
    w_D: Tensor,
    rstd_T: Tensor,
    add_TD: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the op of this name in C++, or without rows and with a top_k of 0 `sum_rmsnorm_dgrad_add`."""
    T, D = _check_rows(drows_SD, order_S, top_k, other_TD, more_TD, x_TD, add_TD)
    assert w_D.shape == (D,) and rstd_T.shape == (T,), (w_D.shape, rstd_T.shape)
    dy_TD, dx_TD = _like(x_TD), _like(x_TD)
    sources = drows_SD, order_S, other_TD, more_TD, x_TD, w_D, rstd_T, add_TD
    call("permuted_rmsnorm_dgrad", x_TD.dtype, T, D, top_k, *sources, dy_TD, dx_TD)
    return dy_TD, dx_TD


def rmsnorm_wgrad_(acc_D: Tensor, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> None:
    assert dy_TD.shape == x_TD.shape and acc_D.dtype == torch.float32 and acc_D.is_contiguous(), (dy_TD.shape, acc_D)
    call("rmsnorm_wgrad", x_TD.dtype, *x_TD.shape, acc_D, dy_TD, x_TD, rstd_T)


def swiglu(h_TM: Tensor, gate_T: Tensor | None = None) -> Tensor:
    """SwiGLU, times a gate weight if given."""
    T, I = h_TM.shape[0], h_TM.shape[1] // 2
    assert h_TM.shape[1] == 2 * I and (gate_T is None or gate_T.shape == (T,)), h_TM.shape
    y_TI = h_TM.new_empty((T, I))
    call("swiglu", h_TM.dtype, T, I, h_TM, gate_T, y_TI)
    return y_TI


def swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    assert h_TM.shape == (dy_TI.shape[0], 2 * dy_TI.shape[1]), (dy_TI.shape, h_TM.shape)
    dh_TM = _like(h_TM)
    call("swiglu_dgrad", h_TM.dtype, *dy_TI.shape, dy_TI, h_TM, None, dh_TM, None)
    return dh_TM


def gated_swiglu_dgrad(dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    assert h_RM.shape == (dy_RI.shape[0], 2 * dy_RI.shape[1]) and gate_R.shape == dy_RI.shape[:1], h_RM.shape
    dh_RM, dgate_R = _like(h_RM), _like(gate_R)
    call("swiglu_dgrad", h_RM.dtype, *dy_RI.shape, dy_RI, h_RM, gate_R, dh_RM, dgate_R)
    return dh_RM, dgate_R


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    assert targets_T.shape == logits_TV.shape[:1] and targets_T.dtype == torch.int64, (logits_TV.shape, targets_T)
    loss, lse_T = _fp32(logits_TV), _fp32(logits_TV, logits_TV.shape[0])
    call("cross_entropy", logits_TV.dtype, *logits_TV.shape, logits_TV, targets_T, loss, lse_T)
    return loss, lse_T


def cross_entropy_dgrad(dloss: Tensor, logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor) -> Tensor:
    assert targets_T.shape == logits_TV.shape[:1] and targets_T.dtype == torch.int64, (logits_TV.shape, targets_T)
    dlogits_TV = _like(logits_TV)
    call("cross_entropy_dgrad", logits_TV.dtype, *logits_TV.shape, dloss, logits_TV, targets_T, lse_T, dlogits_TV)
    return dlogits_TV


def embedding(tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    """Run the op of this name in C++. Raises IndexError for a token of V or more."""
    (T,), (V, D) = tokens_T.shape, w_VD.shape
    assert tokens_T.dtype == torch.int64, tokens_T.dtype
    if T and (last := int(tokens_T.max())) >= V:
        raise IndexError(f"the table of {V} tokens has no token {last}")
    y_TD = w_VD.new_empty((T, D))
    call("embedding", w_VD.dtype, T, D, tokens_T, w_VD, y_TD)
    return y_TD


def embedding_wgrad_(acc_VD: Tensor, dy_TD: Tensor, tokens_T: Tensor) -> None:
    (_, D), (T,) = acc_VD.shape, tokens_T.shape
    assert dy_TD.shape == (T, D) and tokens_T.dtype == torch.int64, (dy_TD.shape, tokens_T)
    assert acc_VD.is_contiguous() and acc_VD.dtype == torch.float32, (acc_VD.stride(), acc_VD.dtype)
    call("embedding_wgrad", dy_TD.dtype, T, D, acc_VD, dy_TD, tokens_T)


def choose(
    score_TE: Tensor,
    bias_E: Tensor | None,
    counted: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """score_TE, bias_E or None (FP32) -> gate_TK, expert_TK: the experts with the best scores, as `route` says."""
    (T, E), bias_E = score_TE.shape, None if bias_E is None else bias_E.float()
    assert E % groups == 0 and 0 < top_k <= top_groups * (E // groups), (E, groups, top_groups, top_k)
    gate_TK, expert_TK = score_TE.new_empty((T, top_k)), score_TE.new_empty((T, top_k), dtype=torch.int64)
    sizes = T, E, top_k, groups, top_groups, counted, normalize
    call("choose", torch.float32, *sizes, scale, score_TE, bias_E, gate_TK, expert_TK)
    return gate_TK, expert_TK


def weigh(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """score_TE (FP32), expert_TK -> gate_TK, as `choose` returns it. Raises IndexError for an expert that is none:
    a file may have named it."""
    if expert_TK.numel():
        first, last = (int(expert) for expert in expert_TK.aminmax())
        if first < 0 or last >= score_TE.shape[1]:
            raise IndexError(f"there are experts 0 to {score_TE.shape[1] - 1}, not {first if first < 0 else last}")
    gate_TK = score_TE.new_empty(expert_TK.shape)
    call("weigh", torch.float32, *score_TE.shape, expert_TK.shape[1], normalize, scale, score_TE, expert_TK, gate_TK)
    return gate_TK


def weigh_dgrad(
    dgate_TK: Tensor, score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float, of_logits: int
) -> Tensor:
    """dgate_TK, score_TE (FP32), expert_TK -> dscore_TE; of_logits: dlogits_TE, if scores are their sigmoid (1) or
    softmax (2)."""
    assert dgate_TK.shape == expert_TK.shape, (dgate_TK.shape, expert_TK.shape)
    dx_TE, sizes = _like(score_TE), (*score_TE.shape, expert_TK.shape[1])
    call("weigh_dgrad", torch.float32, *sizes, normalize, scale, of_logits, dgate_TK, score_TE, expert_TK, dx_TE)
    return dx_TE


def permute(x_TD: Tensor, gate_TK: Tensor, place_S: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD (any dtype), gate_TK (FP32), place_S (int64) -> rows_SD, gate_S, order_S, counts [places]."""
    (T, K), (S,), D = gate_TK.shape, place_S.shape, x_TD.shape[1]
    assert S == T * K and len(x_TD) == T, (gate_TK.shape, place_S.shape, x_TD.shape)
    rows_SD, gate_S, order_S = x_TD.new_empty((S, D)), gate_TK.new_empty(S), torch.empty_like(place_S)
    counts = place_S.new_empty(num_places)
    sizes = S, K, num_places, D * x_TD.itemsize
    call("permute", torch.float32, *sizes, place_S, x_TD, gate_TK, rows_SD, gate_S, order_S, counts)
    return rows_SD, gate_S, order_S, counts


def take_rows(x_TD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """x_TD (any dtype), order_S -> rows_SD: the row of each choice's token."""
    (S,), (T, D) = order_S.shape, x_TD.shape
    assert T * top_k == S, (order_S.shape, x_TD.shape, top_k)
    rows_SD = x_TD.new_empty((S, D))
    call("take_rows", torch.float32, S, top_k, D * x_TD.itemsize, x_TD, order_S, rows_SD)
    return rows_SD


def unpermute(
    rows_SD: Tensor,
    order_S: Tensor,
    top_k: int,
    a_TD: Tensor | None = None,
    b_TD: Tensor | None = None,
    c_TD: Tensor | None = None,
) -> Tensor:
    """rows_SD, order_S and others -> ((a + b) + the sum of each token's rows) + c, each sum rounded."""
    T, D = len(order_S) // top_k, rows_SD.shape[1]
    y_TD = rows_SD.new_empty((T, D))
    _check_rows(rows_SD, order_S, top_k, y_TD, a_TD, b_TD, c_TD)
    call("unpermute", rows_SD.dtype, T, D, top_k, rows_SD, order_S, a_TD, b_TD, c_TD, y_TD)
    return y_TD


def sums(rows_XD: Tensor, copy_X: Tensor, num_copies: int) -> Tensor:
    """rows_XD, copy_X (int64) -> sums_PD: the FP32 sum of the rows of each copy, in their order, rounded once."""
    (X, D), (same_X,) = rows_XD.shape, copy_X.shape
    assert same_X == X and copy_X.dtype == torch.int64, (rows_XD.shape, copy_X)
    y_PD = rows_XD.new_empty((num_copies, D))
    call("sums", rows_XD.dtype, X, num_copies, D, rows_XD, copy_X, y_PD)
    return y_PD


def _check_rows(
    rows_SD: Tensor | None, order_S: Tensor | None, top_k: int, like_TD: Tensor, *others_TD: Tensor | None
) -> torch.Size:
    """Check rows by expert, and operands by token. Return the shape of the latter."""
    T, D = like_TD.shape
    if rows_SD is not None and order_S is not None:
        assert rows_SD.shape == (T * top_k, D) and order_S.shape == (T * top_k,), (rows_SD.shape, order_S.shape, T)
        assert order_S.dtype == torch.int64 and rows_SD.dtype == like_TD.dtype, (order_S.dtype, rows_SD.dtype)
    for x_TD in others_TD:
        assert x_TD is None or (x_TD.shape == (T, D) and x_TD.dtype == like_TD.dtype), (like_TD.shape, x_TD)
    return like_TD.shape


def product_(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, add: bool = False) -> None:
    """c = a·b, or c += a·b in FP32."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    assert c_MN.dtype == (torch.float32 if add else a_MK.dtype), (c_MN.dtype, a_MK.dtype, add)
    assert b_KN.shape[0] == K and c_MN.shape == (M, N) and c_MN.stride(1) == 1, (a_MK.shape, b_KN.shape, c_MN.stride())
    call("product", a_MK.dtype, M, N, K, a_MK, b_KN, c_MN, add)


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    (E, N, K), R = _check_groups(x_RK, w_ENK, offsets_E), len(x_RK)
    assert x_RK.shape[1] == K, (x_RK.shape, w_ENK.shape)
    y_RN = x_RK.new_empty((R, N))
    call("grouped_linear", x_RK.dtype, E, offsets_E, N, K, x_RK, w_ENK, y_RN)
    return y_RN


def grouped_linear_dgrad(dy_RN: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    (E, N, K), R = _check_groups(dy_RN, w_ENK, offsets_E), len(dy_RN)
    assert dy_RN.shape[1] == N, (dy_RN.shape, w_ENK.shape)
    dx_RK = dy_RN.new_empty((R, K))
    call("grouped_linear_dgrad", dy_RN.dtype, E, offsets_E, N, K, dy_RN, w_ENK, dx_RK)
    return dx_RK


def grouped_linear_wgrad_(acc_ENK: Tensor, dy_RN: Tensor, x_RK: Tensor, offsets_E: Tensor) -> None:
    E, N, K = _check_groups(x_RK, acc_ENK, offsets_E)
    assert dy_RN.shape == (len(x_RK), N) and x_RK.shape[1] == K, (dy_RN.shape, x_RK.shape, acc_ENK.shape)
    assert acc_ENK.is_contiguous() and acc_ENK.dtype == torch.float32, (acc_ENK.stride(), acc_ENK.dtype)
    call("grouped_linear_wgrad", x_RK.dtype, E, offsets_E, N, K, dy_RN, x_RK, acc_ENK)


def _check_groups(x_RK: Tensor, by_expert: Tensor, offsets_E: Tensor) -> torch.Size:
    """Check the groups of rows. Return the shape of the experts' weights."""
    assert _groups(offsets_E, len(x_RK)) == len(by_expert), (offsets_E, by_expert.shape)
    return by_expert.shape


def few_rows_(y_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> None:
    """y = x·wᵀ in BF16, with products that are added in FP32."""
    (M, K), N = x_MK.shape, w_NK.shape[0]
    assert w_NK.shape[1] == K and y_MN.shape == (M, N) and y_MN.stride(1) == 1, (x_MK.shape, w_NK.shape, y_MN.stride())
    call("few_rows", x_MK.dtype, M, N, K, x_MK, w_NK, y_MN)


def _pairs(columns: int, angles_Sr: Tensor) -> int:
    """Return the number of columns, checked to be twice that of the angles."""
    assert columns == 2 * angles_Sr.shape[1], (columns, angles_Sr.shape)
    return columns


def _int32(starts: Tensor | None) -> Tensor | None:
    assert starts is None or (starts.dtype == torch.int32 and starts.is_cpu), starts
    return starts


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
