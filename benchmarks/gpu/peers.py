"""Ops as a user would write them in torch, on the op's own arguments; timed in eager mode and with torch.compile.

A formula returns the first of the op's results, or all. For an op that adds to an argument, it does so, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.ops.causal import split_heads
from runtime.ops.quantise import LARGEST, TILE, dequantise


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[1],), w, eps)


def rmsnorm_dgrad(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
    dyw, normed = dy.float() * w, x.float() * rstd[:, None]
    return ((dyw - normed * (dyw * normed).mean(1, keepdim=True)) * rstd[:, None]).to(x.dtype)


def rmsnorm_wgrad_(acc: Tensor, dy: Tensor, x: Tensor, rstd: Tensor) -> None:
    acc += (dy.float() * x * rstd[:, None]).sum(0)


def add_rmsnorm(h: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = h + x
    return total, rmsnorm(total, w, eps)


def rmsnorm_dgrad_add(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, add: Tensor) -> Tensor:
    return rmsnorm_dgrad(dy, x, w, rstd) + add


def head_rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return rmsnorm(x.reshape(-1, len(w)), w, eps).view(x.shape)


def head_rmsnorm_dgrad(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> Tensor:
    return rmsnorm_dgrad(dy.reshape(-1, len(w)), x.reshape(-1, len(w)), w, rstd.flatten()).view(x.shape)


def head_rmsnorm_wgrad_(acc: Tensor, dy: Tensor, x: Tensor, rstd: Tensor) -> None:
    rmsnorm_wgrad_(acc, dy.reshape(-1, len(acc)), x.reshape(-1, len(acc)), rstd.flatten())


def swiglu(h: Tensor) -> Tensor:
    g, u = h.float().chunk(2, 1)
    return (functional.silu(g) * u).to(h.dtype)


def swiglu_dgrad(dy: Tensor, h: Tensor) -> Tensor:
    g, u = h.float().chunk(2, 1)
    s = torch.sigmoid(g)
    return torch.cat([dy * u * s * (1 + g * (1 - s)), dy * g * s], 1).to(h.dtype)


def gated_swiglu(h: Tensor, gate: Tensor) -> Tensor:
    g, u = h.float().chunk(2, 1)
    return (functional.silu(g) * u * gate[:, None]).to(h.dtype)


def gated_swiglu_dgrad(dy: Tensor, h: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    g, u = h.float().chunk(2, 1)
    s, wide = torch.sigmoid(g), dy.float()
    ddown = wide * gate[:, None]
    dh = torch.cat([ddown * u * s * (1 + g * (1 - s)), ddown * g * s], 1).to(h.dtype)
    return dh, (wide * g * s * u).sum(1)


def turned(x_BHSr: Tensor, theta: float, sign: float = 1.0) -> Tensor:
    """Pairs (x0, x1), (x2, x3) … rotated by the angles of their positions; sign −1 rotates back."""
    S, rope = x_BHSr.shape[-2:]
    rates = theta ** (-torch.arange(0, rope, 2, device=x_BHSr.device) / rope)
    angle_Sr = torch.outer(torch.arange(S, device=x_BHSr.device), rates) * sign
    x0, x1 = x_BHSr.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_Sr.cos(), angle_Sr.sin()
    return torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], -1).flatten(-2).to(x_BHSr.dtype)


def merged(x_BHSW: Tensor) -> Tensor:
    """The inverse of `split_heads`."""
    return x_BHSW.transpose(1, 2).flatten(2).flatten(0, 1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled FP32 scores [.., S, S], with −inf for later keys."""
    S, C = q.shape[-2:]
    later = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    return ((q @ k.mT).float() * C**-0.5).masked_fill(later, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k), -1).to(v.dtype) @ v


def attend_dgrad(do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = (scores(q, k) - lse[..., None]).exp()
    delta = (do.float() * o).sum(-1, keepdim=True)
    dscores = (weights * ((do @ v.mT).float() - delta) * q.shape[-1] ** -0.5).to(q.dtype)
    return dscores @ k, dscores.mT @ q, weights.to(do.dtype).mT @ do


def latent_heads(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, (k, v) = split_heads(q, sequence, heads), split_heads(kv, sequence, heads).split((nope, value), -1)
    k_turned = turned(split_heads(k_rope, sequence, 1), theta).expand(-1, heads, -1, -1)
    return torch.cat([q[..., :nope], turned(q[..., nope:], theta)], -1), torch.cat([k, k_turned], -1), v


def mla_attention(q: Tensor, kv: Tensor, k_rope: Tensor, *sizes: Any) -> Tensor:
    return merged(attend(*latent_heads(q, kv, k_rope, *sizes)))


def mla_attention_dgrad(
    do: Tensor, q: Tensor, kv: Tensor, k_rope: Tensor, o: Tensor, lse: Tensor, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sequence, heads, nope, *_, theta = sizes
    do, o = (split_heads(x, sequence, heads) for x in (do, o))
    dq, dk, dv = attend_dgrad(do, o, lse, *latent_heads(q, kv, k_rope, *sizes))
    dq = torch.cat([dq[..., :nope], turned(dq[..., nope:], theta, -1.0)], -1)
    dk_rope = turned(dk[..., nope:].sum(1, keepdim=True), theta, -1.0)
    return merged(dq), merged(torch.cat([dk[..., :nope], dv], -1)), merged(dk_rope)


def grouped_heads(
    q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v by head, with keys and values repeated for every query head."""
    q, k, v = split_heads(q, sequence, heads), split_heads(k, sequence, kv_heads), split_heads(v, sequence, kv_heads)
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (turned(k, theta), v))
    return turned(q, theta), k, v


def gqa_attention(q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> Tensor:
    return merged(attend(*grouped_heads(q, k, v, *sizes)))


def gqa_attention_dgrad(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    sequence, heads, kv_heads, theta = sizes
    do, o = (split_heads(x, sequence, heads) for x in (do, o))
    dq, dk, dv = attend_dgrad(do, o, lse.mT.flatten(1, 2), *grouped_heads(q, k, v, *sizes))
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return merged(turned(dq, theta, -1.0)), merged(turned(dk, theta, -1.0)), merged(dv)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    tiles = functional.pad(x.float(), (0, -columns % TILE)).view(rows, -1, TILE)
    peaks = tiles.abs().amax(2)
    scales = torch.where(peaks == 0, 1.0, peaks * (1.0 / LARGEST))
    data = (tiles / scales[:, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return data.view(rows, -1)[:, :columns].contiguous(), scales


def quantise_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    return quantise(x.t().contiguous())


def quantise_both(x: Tensor) -> tuple[Tensor, ...]:
    return *quantise(x), *quantise_columns(x)


def requantise(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return quantise_columns(dequantise(q, s))


def quantise_requantise(x: Tensor) -> tuple[Tensor, Tensor]:
    return requantise(*quantise(x))


def rmsnorm_quantise(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return quantise(rmsnorm(x, w, eps))


def add_rmsnorm_quantise(h: Tensor, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, ...]:
    total, y = add_rmsnorm(h, x, w, eps)
    return total, *quantise(y)


def swiglu_quantise(h: Tensor) -> tuple[Tensor, Tensor]:
    return quantise(swiglu(h))


def gated_swiglu_quantise(h: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return quantise(gated_swiglu(h, gate))


def swiglu_dgrad_quantise_both(dy: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    return quantise_both(swiglu_dgrad(dy, h))


def gated_swiglu_dgrad_quantise_both(dy: Tensor, h: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    dh, dgate = gated_swiglu_dgrad(dy, h, gate)
    return *quantise_both(dh), dgate


def gated_swiglu_fp8_dgrad_quantise_both(dy: Tensor, h: Tensor, s: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    dh, dgate = gated_swiglu_dgrad(dy, dequantise(h, s), gate)
    return *quantise_both(dh.to(dy.dtype)), dgate


def route(
    logits: Tensor,
    bias: Tensor,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's gate: sigmoid scores, groups chosen by their two best experts, then the best experts of these."""
    assert not softmax and normalize
    score = logits.sigmoid()
    by_group = (score + bias).view(len(logits), groups, -1)
    best = by_group.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    mask = torch.zeros_like(by_group[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    expert = by_group.masked_fill(~mask[:, :, None], -torch.inf).flatten(1).topk(top_k, dim=-1).indices
    gate = score.gather(1, expert)
    return gate / gate.sum(1, keepdim=True) * scale, expert


def unpermute(y: Tensor, order: Tensor, top_k: int) -> Tensor:
    tokens = y.new_zeros(len(y) // top_k, y.shape[1], dtype=torch.float32)
    return tokens.index_add_(0, order // top_k, y.float()).to(y.dtype)


def unpermute_add(h: Tensor, shared: Tensor, y: Tensor, order: Tensor, top_k: int) -> Tensor:
    return h + shared + unpermute(y, order, top_k)


def permute_dgrad_add(y: Tensor, order: Tensor, top_k: int, add: Tensor, more: Tensor) -> Tensor:
    return add + unpermute(y, order, top_k) + more


def unpermute_dgrad(dy: Tensor, order: Tensor, top_k: int) -> Tensor:
    return dy[order // top_k]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")


def linear_cross_entropy(h: Tensor, w: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(h @ w.t(), targets)


FORMULAS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        rmsnorm,
        rmsnorm_dgrad,
        rmsnorm_wgrad_,
        add_rmsnorm,
        rmsnorm_dgrad_add,
        head_rmsnorm,
        head_rmsnorm_dgrad,
        head_rmsnorm_wgrad_,
        swiglu,
        swiglu_dgrad,
        gated_swiglu,
        gated_swiglu_dgrad,
        rmsnorm_quantise,
        add_rmsnorm_quantise,
        swiglu_quantise,
        gated_swiglu_quantise,
        swiglu_dgrad_quantise_both,
        gated_swiglu_dgrad_quantise_both,
        gated_swiglu_fp8_dgrad_quantise_both,
        quantise,
        quantise_columns,
        quantise_both,
        requantise,
        quantise_requantise,
        mla_attention,
        mla_attention_dgrad,
        gqa_attention,
        gqa_attention_dgrad,
        route,
        permute_dgrad_add,
        unpermute,
        unpermute_add,
        unpermute_dgrad,
        cross_entropy,
        linear_cross_entropy,
    )
}
