"""Error bounds of the C++ ops: the FP32 rounding errors of the operations that compute each result.

U is half a unit in the last place of 1. The error of a sum of n products is n·U of the sum of their magnitudes, in any
order; that of e^x is 2·U of e^x, plus the error of x; that of each further operation is U of its result. `SECOND`
covers terms in U². Arguments are those of the op in float64; results are bounds, one for each result of the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.ops import OPS
from runtime.ops.causal import angles, turns
from runtime.ops.gqa_attention import _group_inputs
from runtime.ops.mla_attention import split_inputs

U = 2.0**-24
SECOND = 1.01
SMALLEST = 2.0**-120  # e^x is 0 below 2^-126, and its factors are of order one


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, ...]:
    D = x_TD.shape[1]
    rstd_T = (x_TD.square().mean(1) + eps).rsqrt()
    return (D + 8) * U * (x_TD * w_D).abs() * rstd_T[:, None], (D + 6) * U * rstd_T


def rmsnorm_dgrad(dy_TD: Tensor, x_TD: Tensor, w_D: Tensor, rstd_T: Tensor) -> tuple[Tensor, ...]:
    slope_T1 = (dy_TD * w_D * x_TD).abs().mean(1, keepdim=True) * rstd_T[:, None] ** 2
    return ((x_TD.shape[1] + 10) * U * rstd_T[:, None] * ((dy_TD * w_D).abs() + x_TD.abs() * slope_T1),)


def rmsnorm_wgrad(dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> tuple[Tensor, ...]:
    return ((len(x_TD) + 4) * U * (dy_TD * x_TD * rstd_T[:, None]).abs().sum(0),)


def swiglu(h_TM: Tensor) -> tuple[Tensor, ...]:
    g_TI, u_TI = h_TM.chunk(2, 1)
    return (10 * U * (torch.nn.functional.silu(g_TI) * u_TI).abs(),)


def swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> tuple[Tensor, ...]:
    return gated_swiglu_dgrad(dy_TI, h_TM, torch.ones(len(h_TM), dtype=h_TM.dtype))[:1]


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    return (1.1 * swiglu(h_RM)[0] * gate_R[:, None].abs(),)


def gated_swiglu_dgrad(dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, ...]:
    g_RI, u_RI = h_RM.chunk(2, 1)
    s_RI, weight_R1 = g_RI.sigmoid(), gate_R[:, None].abs()
    dg_RI = (dy_RI * u_RI * s_RI).abs() * weight_R1 * 16 * (1 + g_RI.abs())  # (1 − s)·g loses digits
    parts_RI = (dy_RI * g_RI * s_RI).abs()
    return torch.cat((dg_RI, 12 * parts_RI * weight_R1), 1) * U, (h_RM.shape[1] + 12) * U * (parts_RI * u_RI.abs()).sum(
        1
    )


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, ...]:
    lse_T, top_T = logits_TV.logsumexp(1), logits_TV.amax(1)
    weights_TV, below_TV = logits_TV.softmax(1), (logits_TV - top_T[:, None]).abs()
    terms_T = (weights_TV * below_TV).sum(1) + logits_TV.shape[1] + 4 + 2 * (lse_T - top_T) + lse_T.abs()
    picked_T = logits_TV.gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    losses_T = (terms_T + (lse_T - picked_T).abs()).masked_fill(targets_T < 0, 0)
    total = (lse_T - picked_T).masked_fill(targets_T < 0, 0).abs().sum()
    return U * (losses_T.sum() + 2 * total), U * terms_T


def cross_entropy_dgrad(dloss: Tensor, logits_TV: Tensor, targets_T: Tensor, lse_T: Tensor) -> tuple[Tensor, ...]:
    below_TV = logits_TV - lse_T[:, None]
    picked_TV = torch.zeros_like(logits_TV).scatter_(1, targets_T.clamp(min=0)[:, None], 1.0)
    return (dloss.abs() * U * (below_TV.exp() * (below_TV.abs() + 6) + 3 * picked_TV),)


# ---------------------------------------------------------------- attention: N heads, S positions


def _sizes(x_NSC: Tensor, still: int) -> Tensor:
    """Magnitudes of rotated columns: the length of each pair. The first `still` columns are not rotated."""
    pairs = x_NSC[..., still:].unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(*x_NSC.shape[:2], -1, 2)
    return torch.cat((x_NSC[..., :still].abs(), pairs.flatten(-2)), -1)


def _turned(error_NSC: Tensor, still: int) -> Tensor:
    """Errors after the rotation of pairs."""
    pairs = error_NSC[..., still:].unflatten(-1, (-1, 2)).sum(-1, keepdim=True).expand(*error_NSC.shape[:2], -1, 2)
    return torch.cat((error_NSC[..., :still], pairs.flatten(-2)), -1)


def _scores(q_NSC: Tensor, k_NSC: Tensor, still: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scores, −inf where the key is later or in another document; their errors)."""
    S = q_NSC.shape[1]
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    if starts is not None:
        starts_BS = starts.view(-1, S)
        starts_NS = starts_BS.repeat_interleave(len(q_NSC) // len(starts_BS), dim=0)
        hidden = hidden | (torch.arange(S) < starts_NS[:, :, None])
    off_NSS = (q_NSC.shape[2] + 16) * U * _sizes(q_NSC, still) @ _sizes(k_NSC, still).mT
    return (q_NSC @ k_NSC.mT).masked_fill(hidden, -torch.inf), off_NSS.masked_fill(hidden, 0)


def _peaks(q_NSC: Tensor, k_NSC: Tensor, still: int, starts: Tensor | None, heads: int) -> Tensor:
    """Bounds of the largest score of each head: the largest error of its scores."""
    return _scores(q_NSC, k_NSC, still, starts)[1].amax((1, 2)).view(-1, heads).amax(0)


def _attend(q_NSC: Tensor, k_NSC: Tensor, v_NSD: Tensor, still: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Bounds of o_NSD and lse_NS."""
    S = q_NSC.shape[1]
    scores, off = _scores(q_NSC, k_NSC, still, starts)
    top, lse = scores.amax(-1, keepdim=True), scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    errors = (off + U * ((scores - top).abs() + 3)).nan_to_num(0, 0, 0)
    mean = (weights * errors).sum(-1, keepdim=True)
    return (weights * (errors + mean + (2 * S + 8) * U)) @ v_NSD.abs(), (
        mean + U * (S + 4 + lse.abs() + 2 * (lse - top))
    ).squeeze(-1)


def _attend_dgrad(
    do_NSD: Tensor,
    o_NSD: Tensor,
    lse_NS: Tensor,
    q_NSC: Tensor,
    k_NSC: Tensor,
    v_NSD: Tensor,
    still: int,
    heads: int,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of dq (before scaling), and of the contributions of `heads` heads to dk and dv."""
    S, D = q_NSC.shape[1], v_NSD.shape[2]
    scores, off = _scores(q_NSC, k_NSC, still, starts)
    below = (scores - lse_NS[..., None]).masked_fill(scores.isinf(), 0)
    weights = (scores - lse_NS[..., None]).exp()
    errors = off + U * (below.abs() + 3)
    slope = do_NSD @ v_NSD.mT - (do_NSD * o_NSD).sum(-1, keepdim=True)
    sizes = do_NSD.abs() @ v_NSD.abs().mT + (do_NSD * o_NSD).abs().sum(-1, keepdim=True)
    terms = S * heads + 10
    dscores = weights * (errors * slope.abs() + (D + 3) * U * sizes + terms * U * slope.abs())
    dq, dk = dscores @ _sizes(k_NSC, still), dscores.mT @ _sizes(q_NSC, still)
    return _turned(dq, still), _turned(dk, still), (weights * (errors + terms * U)).mT @ do_NSD.abs()


def _rows(x_NSW: Tensor, heads: int) -> Tensor:
    """[T, heads·W]"""
    return x_NSW.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2).flatten(0, 1)


def _by_head(x_TX: Tensor, sequence: int, heads: int) -> Tensor:
    return x_TX.reshape(-1, sequence, heads, x_TX.shape[1] // heads).transpose(1, 2).flatten(0, 1)


def mla_attention(q: Tensor, kv: Tensor, k_rope: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    S, heads, nope, rope, _, theta, starts, _ = sizes
    turn = turns(angles(S, rope, theta, q.dtype, q.device), starts)
    o, lse = _attend(*split_inputs(q, kv, k_rope, S, heads, nope, turn), nope, starts)
    return _rows(o, heads), lse.unflatten(0, (-1, heads))


def mla_attention_peaks(q: Tensor, kv: Tensor, k_rope: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    S, heads, nope, rope, _, theta, starts, _ = sizes
    turn = turns(angles(S, rope, theta, q.dtype, q.device), starts)
    q_NSC, k_NSC, _ = split_inputs(q, kv, k_rope, S, heads, nope, turn)
    o, lse = mla_attention(q, kv, k_rope, *sizes)
    return o, _peaks(q_NSC, k_NSC, nope, starts, heads), lse


def mla_attention_dgrad(
    do: Tensor, q: Tensor, kv: Tensor, k_rope: Tensor, o: Tensor, lse_BHS: Tensor, *sizes: Any
) -> tuple[Tensor, ...]:
    S, heads, nope, rope, _, theta, starts, _ = sizes
    inputs = split_inputs(q, kv, k_rope, S, heads, nope, turns(angles(S, rope, theta, q.dtype, q.device), starts))
    dq, dk, dv = _attend_dgrad(
        _by_head(do, S, heads), _by_head(o, S, heads), lse_BHS.flatten(0, 1), *inputs, nope, heads, starts
    )
    dkv = _rows(torch.cat((dk[..., :nope], dv), -1), heads)
    return _rows(dq, heads) * (nope + rope) ** -0.5, dkv, dk[..., nope:].unflatten(0, (-1, heads)).sum(1).flatten(0, 1)


def gqa_attention(q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    _, heads, kv_heads, _, starts, _ = sizes
    o, lse = _attend(*_gqa_heads(q, k, v, *sizes[:-1]), 0, starts)
    return _rows(o, heads), lse.unflatten(0, (-1, kv_heads, heads // kv_heads)).transpose(2, 3)


def gqa_attention_peaks(q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> tuple[Tensor, ...]:
    q_NSC, k_NSC, _ = _gqa_heads(q, k, v, *sizes[:-1])
    o, lse = gqa_attention(q, k, v, *sizes)
    return o, _peaks(q_NSC, k_NSC, 0, sizes[-2], sizes[1]), lse


def gqa_attention_dgrad(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *sizes: Any
) -> tuple[Tensor, ...]:
    S, heads, kv_heads, _, starts, _ = sizes
    share, lse_NS = heads // kv_heads, lse.transpose(2, 3).flatten(0, 2)
    operands = (_by_head(do, S, heads), _by_head(o, S, heads), lse_NS, *_gqa_heads(q, k, v, *sizes[:-1]))
    dq, dk, dv = _attend_dgrad(*operands, 0, share, starts)
    shared = (_rows(d.unflatten(0, (-1, share)).sum(1), kv_heads) for d in (dk, dv))
    return _rows(dq, heads) * q.shape[1] ** -0.5 * heads**0.5, *shared


def _gqa_heads(
    q: Tensor, k: Tensor, v: Tensor, S: int, heads: int, kv_heads: int, theta: float, starts: Tensor | None
) -> list[Tensor]:
    """Bounds of `_group_inputs` with each group repeated for all its heads."""
    share = heads // kv_heads
    k, v = (x.unflatten(1, (kv_heads, -1)).repeat_interleave(share, 1).flatten(1) for x in (k, v))
    turn = turns(angles(S, q.shape[1] // heads, theta, q.dtype, q.device), starts)
    return list(_group_inputs(q, k, v, S, heads, heads, turn))


# ---------------------------------------------------------------- products


def _product(op: str, inner: Callable[..., int]) -> Callable[..., tuple[Tensor, ...]]:
    """The bound of an op whose results are sums of `inner` products; the op on magnitudes gives their size."""

    def bound(*args: Any) -> tuple[Tensor, ...]:
        sizes = (arg.abs() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
        return ((inner(*args) + 2) * U * OPS[op](*sizes),)

    return bound


PRODUCTS = {
    op: _product(op, inner)
    for name in ("linear", "linear_wide", "grouped_linear")
    for op, inner in {
        name: lambda x_TK, *_: x_TK.shape[1],
        f"{name}_dgrad": lambda dy_TN, *_: dy_TN.shape[1],
        f"{name}_wgrad": lambda dy_TN, *_: dy_TN.shape[0],
    }.items()
}

BOUNDS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "cross_entropy": cross_entropy,
    "cross_entropy_dgrad": cross_entropy_dgrad,
    "gated_swiglu": gated_swiglu,
    "gated_swiglu_dgrad": gated_swiglu_dgrad,
    "gqa_attention": gqa_attention,
    "gqa_attention_dgrad": gqa_attention_dgrad,
    "gqa_attention_peaks": gqa_attention_peaks,
    "mla_attention": mla_attention,
    "mla_attention_dgrad": mla_attention_dgrad,
    "mla_attention_peaks": mla_attention_peaks,
    "rmsnorm": rmsnorm,
    "rmsnorm_dgrad": rmsnorm_dgrad,
    "rmsnorm_wgrad": rmsnorm_wgrad,
    "swiglu": swiglu,
    "swiglu_dgrad": swiglu_dgrad,
} | PRODUCTS
