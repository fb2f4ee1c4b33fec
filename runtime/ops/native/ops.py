"""Ops in C++: functions of the names, arguments and results of those in `runtime.ops`, where `library.takes` them."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native.library import call


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
    """Run the op of this name in C++; it takes the angles of each position instead of what they are made from.

    q may have the rows of the last positions alone, of each sequence as many, if there are no `starts`: o has these.
    `peaks_H`, if it is there, is raised to the largest logit of each head.
    """
    S, rope = angles_Sr.shape[0], _pairs(k_rope.shape[1], angles_Sr)
    B = kv.shape[0] // S
    Q = q.shape[0] // max(B, 1)
    o, lse_BHS = q.new_empty((q.shape[0], heads * value)), _fp32(q, B, heads, Q)
    given = q, kv, k_rope, angles_Sr, _int32(starts)
    call("mla_attention", q.dtype, B, S, S - Q, heads, nope, rope, value, *given, o, lse_BHS, peaks_H)
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
    given = do, q, kv, k_rope, o, lse_BHS, angles_Sr, _int32(starts)
    call("mla_attention_dgrad", q.dtype, *sizes, *given, *results)
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
    """Run the op of this name in C++, as `mla_attention`."""
    S = angles_Sr.shape[0]
    B = k.shape[0] // S
    Q = q.shape[0] // max(B, 1)
    o, lse = _like(q), _fp32(q, B, kv_heads, Q, heads // kv_heads)
    C, given = _pairs(q.shape[1] // heads, angles_Sr), (q, k, v, angles_Sr, _int32(starts))
    call("gqa_attention", q.dtype, B, S, S - Q, heads, kv_heads, C, *given, o, lse, peaks_H)
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


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert w_D.shape == x_TD.shape[1:], (x_TD.shape, w_D.shape)
    y_TD, rstd_T = _like(x_TD), _fp32(x_TD, x_TD.shape[0])
    call("rmsnorm", x_TD.dtype, *x_TD.shape, x_TD, w_D, eps, y_TD, rstd_T)
    return y_TD, rstd_T


def rmsnorm_dgrad(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor) -> Tensor:
    assert dy_TD.shape == x_TD.shape and w_D.shape == x_TD.shape[1:], (dy_TD.shape, x_TD.shape, w_D.shape)
    dx_TD = _like(x_TD)
    call("rmsnorm_dgrad", x_TD.dtype, *x_TD.shape, dy_TD, x_TD, w_D, rstd_T, dx_TD)
    return dx_TD


def rmsnorm_wgrad_(acc_D: Tensor, dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> None:
    assert dy_TD.shape == x_TD.shape and acc_D.dtype == torch.float32 and acc_D.is_contiguous(), (dy_TD.shape, acc_D)
    call("rmsnorm_wgrad", x_TD.dtype, *x_TD.shape, acc_D, dy_TD, x_TD, rstd_T)


def swiglu(h_TM: Tensor, gate_T: Tensor | None = None) -> Tensor:
    """SwiGLU, times a gate weight if there is one."""
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


def product_(c_MN: Tensor, a_MK: Tensor, b_KN: Tensor, add: bool = False) -> None:
    """c = a·b, or c += a·b in FP32."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    assert c_MN.dtype == (torch.float32 if add else a_MK.dtype), (c_MN.dtype, a_MK.dtype, add)
    assert b_KN.shape[0] == K and c_MN.shape == (M, N) and c_MN.stride(1) == 1, (a_MK.shape, b_KN.shape, c_MN.stride())
    call("product", a_MK.dtype, M, N, K, a_MK, b_KN, c_MN, add)


def _pairs(columns: int, angles_Sr: Tensor) -> int:
    """The columns that the angles turn, in pairs."""
    assert columns == 2 * angles_Sr.shape[1], (columns, angles_Sr.shape)
    return columns


def _int32(starts: Tensor | None) -> Tensor | None:
    assert starts is None or (starts.dtype == torch.int32 and starts.is_cpu), starts
    return starts


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)
