"""Attention of the reference: latent (arXiv 2405.04434, section 2.1) and grouped-query (arXiv 2305.13245).

Shapes: B sequences · S tokens · D hidden · H heads, G of keys and values · N, R, U the nope, rope and value dims of a
head, or W its whole width · X the width of a query · C a latent's rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference.config import Gqa, Mla
from tests.reference.indexer import LightningIndexer
from tests.reference.rotation import grown, rotate


def rmsnorm(x_D: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight, over the last dim; x itself if there is no norm."""
    if weight_D is None:
        return x_D
    return x_D * torch.rsqrt(x_D.pow(2).mean(-1, keepdim=True) + eps) * weight_D


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float64))


def norm(dim: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(dim, dtype=torch.float64))


def attend(
    q_BSHX: Tensor,
    k_BSHX: Tensor,
    v_BSHU: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    hidden_BSS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal softmax attention, without hidden keys -> outputs [B, S, H, U], the weight of each head for each key, and
    the largest logit of each head before the softcap [H]."""
    B, S, H, X = q_BSHX.shape
    score_BHSS = torch.einsum("bqhx,bkhx->bhqk", q_BSHX, k_BSHX) * (X**-0.5 if scale is None else scale)
    distance_SS = torch.arange(S)[:, None] - torch.arange(S)
    unseen_SS = (distance_SS < 0) | (distance_SS >= (S if window is None else window))
    largest_H = torch.stack([score_BHSS[:, head][:, ~unseen_SS].max() for head in range(H)]).detach()
    if softcap is not None:
        score_BHSS = torch.tanh(score_BHSS / softcap) * softcap
    score_BHSS = score_BHSS.masked_fill(unseen_SS, float("-inf"))
    if hidden_BSS is not None:
        score_BHSS = score_BHSS.masked_fill(hidden_BSS[:, None], float("-inf"))
    if sinks_H is None:
        share_BHSS = score_BHSS.softmax(dim=-1)
    else:
        with_sink = torch.cat([score_BHSS, sinks_H.view(1, H, 1, 1).expand(B, H, S, 1)], dim=-1)
        share_BHSS = with_sink.softmax(dim=-1)[..., :-1]
    return torch.einsum("bhqk,bkhu->bqhu", share_BHSS, v_BSHU), share_BHSS, largest_H


class Attention(nn.Module):
    """The common part of both kinds: the largest logit of each head since `largest` was last emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[Tensor] = []  # [H] per call


class MultiHeadLatentAttention(Attention):
    """MLA on a normed input: keys and values come from a latent; one rope key serves all heads."""

    def __init__(self, hidden: int, attention: Mla, norm_eps: float) -> None:
        super().__init__()
        self.attention, self.norm_eps = attention, norm_eps
        H, N, R, U = attention.heads, attention.head_dim.nope, attention.head_dim.rope, attention.head_dim.value
        self.norm = norm(hidden)
        if attention.query_rank is None:
            self.q = weight(H * (N + R), hidden)
        else:
            self.q_down = weight(attention.query_rank, hidden)
            self.q_norm = norm(attention.query_rank)
            self.q_up = weight(H * (N + R), attention.query_rank)
        self.kv_down = weight(attention.kv_rank + R, hidden)
        self.kv_norm = norm(attention.kv_rank)
        self.kv_up = weight(H * (N + U), attention.kv_rank)
        self.out = weight(hidden, H * U)
        self.indexer: LightningIndexer | None = None
        if attention.indexer is not None:
            assert attention.query_rank is not None
            self.indexer = LightningIndexer(hidden, attention.query_rank, attention.indexer)

    def forward(self, h_BSD: Tensor) -> Tensor:
        """h_BSD: [B, S, D], the residual stream -> [B, S, D], to be added to it."""
        B, S, _ = h_BSD.shape
        H, dims, rope = self.attention.heads, self.attention.head_dim, self.attention.rope
        x_BSD = rmsnorm(h_BSD, self.norm, self.norm_eps)

        if self.attention.query_rank is None:
            q = functional.linear(x_BSD, self.q)
        else:
            c_q_BSC = rmsnorm(functional.linear(x_BSD, self.q_down), self.q_norm, self.norm_eps)
            q = functional.linear(c_q_BSC, self.q_up)
        q_nope_BSHN, q_rope_BSHR = q.view(B, S, H, -1).split([dims.nope, dims.rope], dim=-1)
        q_BSHX = torch.cat([q_nope_BSHN, rotate(q_rope_BSHR, rope)], dim=-1)

        c_kv_BSC, k_rope_BSR = functional.linear(x_BSD, self.kv_down).split([self.attention.kv_rank, dims.rope], dim=-1)
        kv = functional.linear(rmsnorm(c_kv_BSC, self.kv_norm, self.norm_eps), self.kv_up)
        k_nope_BSHN, v_BSHU = kv.view(B, S, H, -1).split([dims.nope, dims.value], dim=-1)
        k_rope_BSHR = rotate(k_rope_BSR[:, :, None, :], rope).expand(-1, -1, H, -1)
        k_BSHX = torch.cat([k_nope_BSHN, k_rope_BSHR], dim=-1)

        scale = (dims.nope + dims.rope) ** -0.5 if self.attention.scale is None else self.attention.scale
        if rope and rope.scaling and rope.scaling.mscale_all_dim:
            scale *= grown(rope.scaling.factor, rope.scaling.mscale_all_dim) ** 2
        if self.indexer is None:
            mixed_BSHU, _, largest_H = attend(q_BSHX, k_BSHX, v_BSHU, scale)
            self.largest.append(largest_H)
            return functional.linear(mixed_BSHU.flatten(2), self.out)
        scores_BSS = self.indexer.scores(x_BSD, c_q_BSC, rope, dims.rope)
        unseen_BSS = self.indexer.unseen(scores_BSS)
        mixed_BSHU, share_BHSS, _ = attend(q_BSHX, k_BSHX, v_BSHU, scale, hidden_BSS=unseen_BSS)
        self.indexer.learn(scores_BSS, unseen_BSS, share_BHSS)
        return functional.linear(mixed_BSHU.flatten(2), self.out)


class GroupedQueryAttention(Attention):
    """GQA on a normed input: each head of keys and values serves `heads / kv_heads` neighbouring query heads."""

    def __init__(self, hidden: int, attention: Gqa, norm_eps: float) -> None:
        super().__init__()
        self.attention, self.norm_eps = attention, norm_eps
        H, G, W, normed = attention.heads, attention.kv_heads, attention.head_dim, attention.qk_norm
        self.norm = norm(hidden)
        columns = ((2 if attention.output_gate else 1) * H + 2 * G) * W
        self.qkv = weight(columns, hidden)
        if attention.bias:
            self.qkv_bias = weight(columns)
        if normed:
            self.q_norm, self.k_norm = (norm(W if normed == "head" else num * W) for num in (H, G))
        if attention.sinks:
            self.sinks = weight(H)
        self.out = weight(hidden, H * W)
        if attention.bias == "all":
            self.out_bias = weight(hidden)

    def forward(self, h_BSD: Tensor) -> Tensor:
        """h_BSD: [B, S, D], the residual stream -> [B, S, D], to be added to it."""
        sizes = self.attention
        x_BSD = rmsnorm(h_BSD, self.norm, self.norm_eps)
        all_BSW = functional.linear(x_BSD, self.qkv, self.qkv_bias if sizes.bias else None)
        counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads, *((sizes.heads,) if sizes.output_gate else ()))
        parts = all_BSW.split([n * sizes.head_dim for n in counts], dim=-1)
        q_BSHW, k_BSGW, v_BSGW, *gate = (x.unflatten(-1, (-1, sizes.head_dim)) for x in parts)
        if sizes.qk_norm:
            full_width = sizes.qk_norm == "width"
            q, k = (x.flatten(2) if full_width else x for x in (q_BSHW, k_BSGW))
            q_BSHW = rmsnorm(q, self.q_norm, self.norm_eps).view_as(q_BSHW)
            k_BSGW = rmsnorm(k, self.k_norm, self.norm_eps).view_as(k_BSGW)
        served = sizes.heads // sizes.kv_heads
        k_BSHW, v_BSHW = (x.repeat_interleave(served, dim=2) for x in (rotate(k_BSGW, sizes.rope), v_BSGW))
        sinks_H = self.sinks if sizes.sinks else None
        bounds = sizes.scale, sizes.window, sizes.softcap, sinks_H
        mixed, _, largest_H = attend(rotate(q_BSHW, sizes.rope), k_BSHW, v_BSHW, *bounds)
        self.largest.append(largest_H)
        if sizes.output_gate:
            mixed = mixed * torch.sigmoid(gate[0])
        return functional.linear(mixed.flatten(2), self.out, self.out_bias if sizes.bias == "all" else None)


def by_document(attention: Callable[[Tensor], Tensor], h_BSD: Tensor, starts_BS: Tensor | None) -> Tensor:
    """Attention on each document separately. starts_BS: the start of each token's document in its sequence."""
    if starts_BS is None:
        return attention(h_BSD)
    rows = []
    for h_SD, starts in zip(h_BSD, starts_BS.tolist(), strict=True):
        begins = sorted({*starts})
        parts = [h_SD[a:b] for a, b in zip(begins, [*begins[1:], len(h_SD)], strict=True)]
        rows.append(torch.cat([attention(part[None])[0] for part in parts]))
    return torch.stack(rows)
