"""Multi-head latent attention after its projections: RoPE, keys assembled from both parts, causal softmax attention.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. T tokens in B sequences of S, H heads. A head's query and key are
[nope | rope] (width C); all heads share the rope part of the key. P = B·H: the heads of all sequences.

Forward / backward of the whole op in ms, S 256, one core (EPYC, shared; least CPU time of 15 calls, with an allocator
that keeps freed memory):

    B H nope rope value | FP32: these blocks  torch's flash, value padded  bmm of all scores | FP64, the same three
    4 4   32   16    32 |       2.6 /  6.4           3.5 /  7.8                3.2 /  8.9    |  7.2/14  7.9/16  11/21
    4 8   32   16    32 |       5.5 / 13.2           6.7 / 15.8                8.0 / 19.5    |   14/27   15/32  22/43
    1 4  128   64   128 |       1.9 /  4.6           2.7 /  6.7                2.4 /  6.7    |  4.1/10  5.8/14  6.1/13
    1 8  128   64   128 |       3.9 /  8.9           5.7 / 13.0                4.9 / 12.5    |  8.9/21   12/27  12/27
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.causal import (
    angles,
    attend,
    attend_dgrad,
    columns,
    inverse_angles,
    new_peaks,
    of_heads,
    rotate,
    split_heads,
    turns,
)
from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide
from runtime.ops.quantise import quantise_both
from runtime.ops.quantise_e5m6 import dequantise_e5m6, quantise_kept_e5m6


def mla_attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H·(nope+rope)], kv [T, H·(nope+value)], k_rope [T, rope] -> o [T, H·value], lse_BHS.

    Per head, q is [nope | rope] and kv is [nope | value]; softmax(q·k/√(nope+rope)) over the keys at or before the
    query; lse is the logarithm of its denominator, in at least FP32. k_rope may be a view of columns. `starts` int32
    [T]: the position in its sequence where each token's document starts; a query sees only keys of its document, and
    positions count from there.

    With `positions` int32, one per query, q has only some rows of each sequence, the same number for each, and theta
    must be 0.
    """
    return _attention(q, kv, k_rope, sequence, heads, nope, rope, value, theta, starts, positions)


def mla_attention_peaks(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `mla_attention` and, before lse, peaks_H: the largest logit of each head, at least FP32."""
    peaks_H = new_peaks(q, heads)
    settings = sequence, heads, nope, rope, value, theta, starts, positions
    o, lse_BHS = _attention(q, kv, k_rope, *settings, peaks_H)
    return o, peaks_H, lse_BHS


def _attention(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None,
    positions: Tensor | None,
    peaks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o and lse. `peaks_H` from `new_peaks`, if given, receives the largest logit of each head."""
    angles_Sr = angles(sequence, rope, theta, q.dtype, q.device)
    if positions is None and runs_natively(q, kv, k_rope):
        return native.mla_attention(q, kv, k_rope, angles_Sr, heads, nope, value, starts, peaks_H)
    inputs = split_inputs(
        wide(q), wide(kv), wide(k_rope), sequence, heads, nope, turns(angles_Sr, starts) if theta else None
    )
    queries = inputs[0].shape[1]
    places = of_heads(starts, queries, heads), of_heads(positions, queries, heads)
    peaks_PS = None if peaks_H is None else inputs[0].new_empty(inputs[0].shape[:2])
    o_PSV, lse_PS = attend(*inputs, None, 0, 0.0, *places, peaks_PS)
    if peaks_H is not None and peaks_PS is not None:
        torch.amax(peaks_PS.unflatten(0, (-1, heads)), dim=(0, 2), out=peaks_H)
    return columns(o_PSV.to(q.dtype), heads), lse_PS.unflatten(0, (-1, heads))


def mla_attention_dgrad(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    o: Tensor,
    lse_BHS: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·value], the forward's inputs and results -> dq, dkv, dk_rope, shaped like q, kv, k_rope."""
    angles_Sr = angles(sequence, rope, theta, q.dtype, q.device)
    if positions is None and runs_natively(q, kv, k_rope):
        return native.mla_attention_dgrad(do, q, kv, k_rope, o, lse_BHS, angles_Sr, heads, nope, value, starts)
    dtype, turned_by, queries = q.dtype, turns(angles_Sr, starts) if theta else None, lse_BHS.shape[2]
    do, q, kv, k_rope, o = (wide(x) for x in (do, q, kv, k_rope, o))
    do_PSV = split_heads(do, queries, heads).flatten(0, 1).contiguous()
    delta_TH = (do * o).unflatten(1, (heads, value)).sum(dim=-1)
    delta_PS = split_heads(delta_TH, queries, heads)[..., 0].flatten(0, 1)
    inputs = split_inputs(q, kv, k_rope, sequence, heads, nope, turned_by)
    places = of_heads(starts, queries, heads), of_heads(positions, queries, heads)
    gradients = attend_dgrad(do_PSV, delta_PS, lse_BHS.flatten(0, 1), *inputs, 0, 0.0, *places)
    dq, dkv, dk_rope = join_gradients(*gradients, heads, nope, turned_by)
    return dq.to(dtype), dkv.to(dtype), dk_rope.to(dtype)


def split_inputs(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention's inputs, and angles from `turns` or None -> q_PQC, rotated and scaled by 1/√C; k_PSC, both parts
    joined and rotated; v_PSV."""
    angles_1S = None if angles is None else angles.unsqueeze(-3)
    kv_BHSW, k_rope_B1Sr = split_heads(kv, sequence, heads), split_heads(k_rope, sequence, 1)
    q_BHQC = split_heads(q, q.shape[0] // len(kv_BHSW), heads)
    queries, keys = q.new_empty(q_BHQC.shape), q.new_empty((*kv_BHSW.shape[:3], q_BHQC.shape[3]))
    scale = q_BHQC.shape[3] ** -0.5
    torch.mul(q_BHQC[..., :nope], scale, out=queries[..., :nope])
    queries[..., nope:] = rotate(q_BHQC[..., nope:], angles_1S, scale)
    keys[..., :nope] = kv_BHSW[..., :nope]
    keys[..., nope:] = rotate(k_rope_B1Sr, angles_1S)
    return queries.flatten(0, 1), keys.flatten(0, 1), kv_BHSW[..., nope:].flatten(0, 1).contiguous()


def join_gradients(
    dq_PQC: Tensor, dk_PSC: Tensor, dv_PSV: Tensor, heads: int, nope: int, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the results of `split_inputs` -> dq, dkv, dk_rope. `angles`: the same as there; inverted here."""
    dq_BHQC, dk_BHSC, dv_BHSV = (d.unflatten(0, (-1, heads)) for d in (dq_PQC, dk_PSC, dv_PSV))
    (B, H, Q, C), (S, V) = dq_BHQC.shape, dv_BHSV.shape[2:]
    back_by = None if angles is None else inverse_angles(angles)
    scale, back_1S = C**-0.5, None if back_by is None else back_by.unsqueeze(-3)
    dq_BQHC, dkv_BSHW = dq_PQC.new_empty((B, Q, H, C)), dq_PQC.new_empty((B, S, H, nope + V))
    torch.mul(dq_BHQC[..., :nope].transpose(1, 2), scale, out=dq_BQHC[..., :nope])
    dq_BQHC[..., nope:] = rotate(dq_BHQC[..., nope:], back_1S, scale).transpose(1, 2)
    dkv_BSHW[..., :nope] = dk_BHSC[..., :nope].transpose(1, 2)
    dkv_BSHW[..., nope:] = dv_BHSV.transpose(1, 2)
    dk_rope_BSr = rotate(dk_BHSC[..., nope:].sum(dim=1), back_by)
    return dq_BQHC.view(B * Q, H * C), dkv_BSHW.view(B * S, H * (nope + V)), dk_rope_BSr.flatten(0, 1)


# --- Latent attention fused with quantisation of its result, and its gradient, which reads and writes quantised tensors
#
# T tokens, O = H·value columns, B tiles of 128 columns. Each equals the separate ops in sequence: a result is rounded
# to the dtype it would be stored in, then quantised. E5M6 is three tensors (`quantise_e5m6`), E4M3 is data and scales.

Gradients = tuple[Tensor, Tensor, Tensor]
Quantised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def mla_attention_quantise_kept_e5m6(
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    pow2: bool = False,
) -> tuple[Tensor, ...]:
    """The arguments of `mla_attention` -> o in E4M3: data [T, O], s_TB; in E5M6: high_TO, low [T, O / 2], s_TB; lse."""
    o_TO, lse_BHS = mla_attention(q, kv, k_rope, sequence, heads, nope, rope, value, theta)
    return *quantise_kept_e5m6(o_TO, pow2), lse_BHS


def dequantise_mla_attention_dgrad_e5m6(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    high_TO: Tensor,
    low: Tensor,
    s_TB: Tensor,
    lse_BHS: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
) -> Gradients:
    """The arguments of `mla_attention_dgrad`, with o in E5M6 -> dq, dkv, dk_rope."""
    o_TO = dequantise_e5m6(high_TO, low, s_TB)
    return mla_attention_dgrad(do, q, kv, k_rope, o_TO, lse_BHS, sequence, heads, nope, rope, value, theta)


def mla_attention_dgrad_quantise_both(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    o: Tensor,
    lse_BHS: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    pow2: bool = False,
) -> Quantised:
    """The arguments of `mla_attention_dgrad` -> dq; dkv by rows, scales, by columns, scales; dk_rope."""
    sizes = (sequence, heads, nope, rope, value, theta)
    dq, dkv, dk_rope = mla_attention_dgrad(do, q, kv, k_rope, o, lse_BHS, *sizes)
    return dq, *quantise_both(dkv, pow2), dk_rope


def dequantise_mla_attention_dgrad_quantise_both_e5m6(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    k_rope: Tensor,
    high_TO: Tensor,
    low: Tensor,
    s_TB: Tensor,
    lse_BHS: Tensor,
    sequence: int,
    heads: int,
    nope: int,
    rope: int,
    value: int,
    theta: float,
    pow2: bool = False,
) -> Quantised:
    """The arguments of `mla_attention_dgrad`, with o in E5M6 -> dq; dkv by rows, scales, by columns, scales;
    dk_rope."""
    sizes = (sequence, heads, nope, rope, value, theta)
    o_TO = dequantise_e5m6(high_TO, low, s_TB)
    return mla_attention_dgrad_quantise_both(do, q, kv, k_rope, o_TO, lse_BHS, *sizes, pow2)


OPS = (
    mla_attention,
    mla_attention_peaks,
    mla_attention_dgrad,
    mla_attention_quantise_kept_e5m6,
    dequantise_mla_attention_dgrad_e5m6,
    mla_attention_dgrad_quantise_both,
    dequantise_mla_attention_dgrad_quantise_both_e5m6,
)
