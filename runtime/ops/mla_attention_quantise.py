"""Latent attention whose result is quantised in the same pass, and its gradient: of what was kept so, and quantised.

T tokens, O = H·value columns, B tiles of 128 columns. Each is the ops one after the other: a result is rounded to the
dtype it would be stored in, and then quantised. E5M6 is three tensors (`quantise_e5m6`), E4M3 is data and scales.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.mla_attention import mla_attention, mla_attention_dgrad
from runtime.ops.quantise import quantise_both
from runtime.ops.quantise_e5m6 import dequantise_e5m6, quantise_kept_e5m6

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
    """The arguments of `mla_attention_dgrad`, what attention returned in E5M6 -> dq, dkv, dk_rope."""
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
    """The arguments of `mla_attention_dgrad`, what attention returned in E5M6 -> dq; dkv by rows, scales, by columns,
    scales; dk_rope."""
    sizes = (sequence, heads, nope, rope, value, theta)
    o_TO = dequantise_e5m6(high_TO, low, s_TB)
    return mla_attention_dgrad_quantise_both(do, q, kv, k_rope, o_TO, lse_BHS, *sizes, pow2)


OPS = (
    mla_attention_quantise_kept_e5m6,
    dequantise_mla_attention_dgrad_e5m6,
    mla_attention_dgrad_quantise_both,
    dequantise_mla_attention_dgrad_quantise_both_e5m6,
)
