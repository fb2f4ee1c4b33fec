"""Grouped-query attention after its projections: RoPE on the whole head, causal softmax attention.

Ainslie et al., "GQA", 2023. T tokens in B sequences of S, H query heads of width C, G key/value heads: query head h
uses head h // (H/G). N = B·G, and M = S·H/G: the query heads of a group become additional query rows against its keys.

Forward / backward in ms, S 256, one core (EPYC, shared; least CPU time of 12 calls). `copied`: keys and values repeated
for every query head, not counting the time to repeat them and to sum their gradients:

    B G H/G   C | FP32: this op     copied   torch's sdpa | FP64, the same three
    4 2   4  48 |    4.7 / 14.1  5.9 / 18.0    5.1 / 12.6 |  10.5 / 27   15.3 / 44   11.0 / 24
    4 1   8  64 |    5.8 / 11.9  7.8 / 23.1    6.8 / 16.0 |  11.1 / 27   18.5 / 50   16.6 / 43
    1 4   4 128 |    5.1 / 12.1  6.3 / 15.2    6.2 / 16.7 |  11.7 / 27   13.8 / 44   13.2 / 33
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
from runtime.ops.product import wide, wide_dtype


def gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H·C], k and v [T, G·C] -> o [T, H·C], lse [B, G, S, H/G].

    softmax(q·k/√C) over the keys at or before the query; lse is the logarithm of its denominator, in at least FP32. q,
    k and v may be views of columns. `starts` int32 [T]: the position in its sequence where each token's document
    starts; a query sees only keys of its document, and positions count from there. With `positions` int32, one per
    query, q has only some rows of each sequence, the same number for each, and theta must be 0.
    """
    return _attention(q, k, v, sequence, heads, kv_heads, theta, starts, positions)


def gqa_attention_peaks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `gqa_attention` and, before lse, peaks_H: each query head's largest logit, at least
    FP32."""
    peaks_H = new_peaks(q, heads)
    o, lse = _attention(q, k, v, sequence, heads, kv_heads, theta, starts, positions, peaks_H)
    return o, peaks_H, lse


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None,
    positions: Tensor | None,
    peaks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o and lse. `peaks_H` from `new_peaks`, if given, receives the largest logit of each head."""
    angles_Sr = angles(sequence, q.shape[1] // heads, theta, q.dtype, q.device)
    if positions is None and runs_natively(q, k, v):
        return native.gqa_attention(q, k, v, angles_Sr, heads, kv_heads, starts, peaks_H)
    turned_by = turns(angles_Sr, starts) if theta else None
    sizes = sequence, heads, kv_heads, turned_by
    return attend_groups(q, k, v, *sizes, starts=starts, positions=positions, peaks_H=peaks_H)


def gqa_attention_dgrad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·C], the forward's inputs and results -> dq, dk, dv, shaped like q, k, v."""
    angles_Sr = angles(sequence, q.shape[1] // heads, theta, q.dtype, q.device)
    if positions is None and runs_natively(q, k, v):
        return native.gqa_attention_dgrad(do, q, k, v, o, lse, angles_Sr, heads, kv_heads, starts)
    sizes = sequence, heads, kv_heads, turns(angles_Sr, starts) if theta else None
    return attend_groups_dgrad(do, q, k, v, o, lse, *sizes, starts=starts, positions=positions)


# ---------------------------------------------------------------- on torch
def attend_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    angles: Tensor | None,
    sinks: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
    peaks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B·Q, H·C], k and v [B·S, G·C], angles from `turns` or None, sinks [H] or None -> o [B·Q, H·C], lse [B, G, Q,
    H/G]. `attend` explains the other arguments. `peaks_H`, if given, receives the largest logit of each head."""
    inputs = _group_inputs(wide(q), wide(k), wide(v), sequence, heads, kv_heads, angles)
    B = k.shape[0] // sequence
    rows = (B, kv_heads, q.shape[0] // B, heads // kv_heads)
    sinks_NM = None if sinks is None else wide(sinks).view(1, kv_heads, 1, -1).expand(rows).flatten(0, 1).flatten(1)
    places = of_heads(starts, rows[2], kv_heads), of_heads(positions, rows[2], kv_heads)
    peaks_NM = None if peaks_H is None else inputs[0].new_empty(inputs[0].shape[:2])
    o_NMC, lse_NM = attend(*inputs, sinks_NM, window, softcap, *places, peaks_NM)
    if peaks_H is not None and peaks_NM is not None:
        torch.amax(peaks_NM.view(rows), dim=(0, 2), out=peaks_H.view(kv_heads, -1))
    return _ungroup_rows(o_NMC.to(q.dtype), rows[2], kv_heads), lse_NM.view(rows)


def attend_groups_dgrad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    angles: Tensor | None,
    window: int = 0,
    softcap: float = 0.0,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [B·Q, H·C], the inputs and results of `attend_groups` -> dq, dk, dv, shaped like q, k, v."""
    C, dtype, queries = q.shape[1] // heads, q.dtype, lse.shape[2]
    do, q, k, v, o = (wide(x) for x in (do, q, k, v, o))
    back_by = None if angles is None else inverse_angles(angles)
    delta_TH = (do * o).unflatten(1, (heads, C)).sum(dim=-1)
    do_NMC, delta_NM = _rows(do, queries, kv_heads, C), _rows(delta_TH, queries, kv_heads, 1)[..., 0]
    inputs = _group_inputs(q, k, v, sequence, heads, kv_heads, angles)
    places = of_heads(starts, queries, kv_heads), of_heads(positions, queries, kv_heads)
    gradients = attend_dgrad(do_NMC, delta_NM, lse.flatten(0, 1).flatten(1), *inputs, window, softcap, *places)
    dq_NMC, dk_NSC, dv_NSC = gradients
    dq_NMC, dk_NSC = _rotate_rows(dq_NMC, kv_heads, back_by, C**-0.5), _rotate_rows(dk_NSC, kv_heads, back_by)
    return (
        _ungroup_rows(dq_NMC.to(dtype), queries, kv_heads),
        _ungroup_rows(dk_NSC.to(dtype), sequence, kv_heads),
        _ungroup_rows(dv_NSC.to(dtype), sequence, kv_heads),
    )


def _group_inputs(
    q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The attention's inputs, and angles from `turns` or None -> q_NMC, rotated and scaled by 1/√C; k_NSC, rotated;
    v_NSC."""
    C, queries = q.shape[1] // heads, q.shape[0] // (k.shape[0] // sequence)
    k_NSC, v_NSC = (_rows(x, sequence, kv_heads, C) for x in (k, v))
    return (
        _rotate_rows(_rows(q, queries, kv_heads, C), kv_heads, angles, C**-0.5),
        _rotate_rows(k_NSC, kv_heads, angles),
        v_NSC,
    )


def _rows(x: Tensor, sequence: int, kv_heads: int, width: int) -> Tensor:
    """x [T, G·r·W] -> [N, S·r, W], contiguous."""
    x_BGSX = split_heads(x, sequence, kv_heads)
    return x_BGSX.contiguous().view(x_BGSX.shape[0] * kv_heads, -1, width)


def _ungroup_rows(x_NMW: Tensor, sequence: int, kv_heads: int) -> Tensor:
    """x_NMW -> [T, G·r·W], the inverse of `_rows`."""
    return columns(x_NMW.view(x_NMW.shape[0], sequence, -1), kv_heads)


def _rotate_rows(x_NMC: Tensor, kv_heads: int, angles: Tensor | None, scale: float = 1.0) -> Tensor:
    """Return x_NMC, scaled, with the rows of each position rotated by its angles: [S, r], or per sequence [B, S, r]."""
    if angles is None:
        return x_NMC if scale == 1 else x_NMC * scale
    angles = angles if angles.dim() == 2 else angles.repeat_interleave(kv_heads, dim=0)
    return rotate(x_NMC.unflatten(1, (angles.shape[-2], -1)), angles.unsqueeze(-2), scale).flatten(1, 2)


# --- Grouped-query attention with a window, a softcap, sinks, or several of these
#
# A window limits a query to the last `window` keys (Beltagy et al., "Longformer", 2020). A softcap maps logits s to
# softcap·tanh(s/softcap) (Gemma Team, "Gemma 2", 2024). A sink is an extra logit per query head that appears only in
# the softmax's denominator (Xiao et al., "Efficient streaming language models with attention sinks", 2023; GPT-OSS).
# Everything else is as in `gqa_attention`. This runs on torch in blocks; like the kernel's, its time grows with
# S·window.


def bounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    softcap: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H·C], k and v [T, G·C], sinks [H] or None -> o [T, H·C], lse [B, G, S, H/G].

    window 0: all keys at or before the query; softcap 0: no softcap. lse includes the sinks. q, k and v may be views of
    columns. `starts` and `positions`: as in `gqa_attention`.
    """
    turned_by = _angles(q, sequence, heads, theta, starts)
    return attend_groups(q, k, v, sequence, heads, kv_heads, turned_by, sinks, window, softcap, starts, positions)


def bounded_attention_peaks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    softcap: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `bounded_attention` and, before lse, peaks_H: each head's largest logit, at least FP32."""
    peaks_H, turned_by = new_peaks(q, heads), _angles(q, sequence, heads, theta, starts)
    sizes = sequence, heads, kv_heads, turned_by, sinks, window, softcap
    o, lse = attend_groups(q, k, v, *sizes, starts, positions, peaks_H)
    return o, peaks_H, lse


def bounded_attention_dgrad(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    window: int,
    softcap: float,
    starts: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """do [T, H·C], the forward's inputs and results -> dq, dk, dv, shaped like q, k, v."""
    sizes = sequence, heads, kv_heads, _angles(q, sequence, heads, theta, starts), window, softcap
    return attend_groups_dgrad(do, q, k, v, o, lse, *sizes, starts, positions)


def _angles(q: Tensor, sequence: int, heads: int, theta: float, starts: Tensor | None) -> Tensor | None:
    """Return the angles that rotate queries and keys, or None without rotation."""
    width = q.shape[1] // heads
    return turns(angles(sequence, width, theta, q.dtype, q.device), starts) if theta else None


def bounded_attention_wgrad(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """do and o [T, H·C], lse [B, G, S, H/G], sinks [H] -> dsinks [H] = −Σ_t e^(sink − lse)·(do·o)."""
    B, G, S, r = lse.shape
    delta_BSGr = (wide(do) * wide(o)).view(B, S, G, r, do.shape[1] // (G * r)).sum(dim=-1)
    share_BSGr = (wide(sinks).view(G, 1, r) - lse).exp().transpose(1, 2)
    return -(share_BSGr * delta_BSGr).sum(dim=(0, 1)).flatten().to(sinks.dtype)


def bounded_attention_wgrad_(acc: Tensor, do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """acc [H] += dsinks of (do, o, lse, sinks), in the dtype of acc."""
    acc.add_(bounded_attention_wgrad(do, o, lse, sinks.to(wide_dtype(sinks.dtype))))


OPS = (
    gqa_attention,
    gqa_attention_peaks,
    gqa_attention_dgrad,
    bounded_attention,
    bounded_attention_peaks,
    bounded_attention_dgrad,
    bounded_attention_wgrad,
    bounded_attention_wgrad_,
)
