"""Grouped-query attention with a window, bounded logits, sinks, or several of these.

A window leaves a query the last so many keys (Beltagy et al., "Longformer", 2020). A softcap bends logits s to
softcap·tanh(s/softcap) (Gemma Team, "Gemma 2", 2024). A sink is a logit of each query head in the denominator of its
softmax alone (Xiao et al., "Efficient streaming language models with attention sinks", 2023; GPT-OSS). All else is as
in `gqa_attention`. This runs on torch, block by block, in time that grows with S·window, as its kernel's does.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.causal import angles, new_peaks, turns
from runtime.ops.gqa_attention import attend_groups, attend_groups_dgrad
from runtime.ops.wide import wide, wide_dtype


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
    """q [T, H·C], k and v [T, G·C], sinks [H] or none -> o [T, H·C], lse [B, G, S, H/G].

    window 0: all keys at or before the query; softcap 0: logits as they are. lse has the sinks. q, k and v may be views
    of columns. `starts` and `positions`: as in `gqa_attention`.
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
    """Give what `bounded_attention` does and, before lse, peaks_H: the largest logit of each head, FP32 at least."""
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
    """By what queries and keys are rotated; nothing if they are not."""
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
    bounded_attention,
    bounded_attention_peaks,
    bounded_attention_dgrad,
    bounded_attention_wgrad,
    bounded_attention_wgrad_,
)
