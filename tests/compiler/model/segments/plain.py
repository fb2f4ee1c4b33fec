"""The op table in plain torch, for autograd: formulas of the tests' own, simple and slow."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tests.compiler.model.segments.plain_compressed import block_linear as block_linear
from tests.compiler.model.segments.plain_compressed import compress as compress
from tests.compiler.model.segments.plain_compressed import compressed_attention as compressed_attention
from tests.compiler.model.segments.plain_compressed import unweighted_rmsnorm as unweighted_rmsnorm
from tests.compiler.model.segments.plain_hyper import hyper_add as hyper_add
from tests.compiler.model.segments.plain_hyper import hyper_collapse as hyper_collapse
from tests.compiler.model.segments.plain_hyper import hyper_copy as hyper_copy
from tests.compiler.model.segments.plain_hyper import hyper_mix as hyper_mix
from tests.compiler.model.segments.plain_hyper import hyper_products as hyper_products
from tests.compiler.model.segments.plain_hyper import scale_parts as scale_parts
from tests.compiler.model.segments.plain_indexer import chosen_attention as chosen_attention
from tests.compiler.model.segments.plain_indexer import indexer_loss as indexer_loss
from tests.compiler.model.segments.plain_indexer import select_keys as select_keys
from tests.compiler.model.segments.plain_losses import cross_entropy as cross_entropy
from tests.compiler.model.segments.plain_losses import cross_entropy_of_parts as cross_entropy_of_parts
from tests.compiler.model.segments.plain_losses import cross_entropy_part as cross_entropy_part
from tests.compiler.model.segments.plain_losses import place_parts as place_parts
from tests.compiler.model.segments.plain_losses import policy_loss as policy_loss
from tests.compiler.model.segments.plain_padding import blank_rows as blank_rows
from tests.compiler.model.segments.plain_padding import real_balance as real_balance
from tests.compiler.model.segments.plain_padding import real_balance_scores as real_balance_scores
from tests.compiler.model.segments.plain_padding import real_counts as real_counts
from tests.compiler.model.segments.plain_padding import spread_padding as spread_padding


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def cat2(a_TM: Tensor, b_TN: Tensor) -> Tensor:
    return torch.cat([a_TM, b_TN], dim=1)


def split2(x_TM: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return x_TM[:, :at], x_TM[:, at:]


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return functional.linear(x_TK, w_NK)


def linear_wide(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return functional.linear(x_TK, w_NK)


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    return x_TD / torch.sqrt((x_TD**2).mean(dim=1, keepdim=True) + eps) * w_D


def embedding(tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    return torch.where((tokens_T >= 0)[:, None], w_VD[tokens_T], 0.0)


def swiglu(h_TM: Tensor) -> Tensor:
    gate_TI, up_TI = h_TM.chunk(2, dim=1)
    return gate_TI * torch.sigmoid(gate_TI) * up_TI


def geglu(h_TM: Tensor) -> Tensor:
    gate_TI, up_TI = h_TM.chunk(2, dim=1)
    return gelu(gate_TI) * up_TI


def geglu_tanh(h_TM: Tensor) -> Tensor:
    gate_TI, up_TI = h_TM.chunk(2, dim=1)
    return gelu_tanh(gate_TI) * up_TI


def gelu(h_TI: Tensor) -> Tensor:
    return h_TI * (1 + torch.erf(h_TI / 2**0.5)) / 2


def gelu_tanh(h_TI: Tensor) -> Tensor:
    return h_TI * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h_TI + 0.044715 * h_TI**3))) / 2


def relu2(h_TI: Tensor) -> Tensor:
    return torch.where(h_TI > 0, h_TI * h_TI, 0.0)


def clamped_swiglu(h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    gate_TI, up_TI = h_TM.chunk(2, dim=1)
    gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)
    return gate_TI * torch.sigmoid(alpha * gate_TI) * (up_TI + shift)


def scale(x_TN: Tensor, factor: float) -> Tensor:
    return x_TN * factor


def softcap(x_TN: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x_TN / cap)


def gate_rows(x_RI: Tensor, gate_R: Tensor) -> Tensor:
    return x_RI * gate_R[:, None]


def gate_columns(x_TN: Tensor, z_TN: Tensor, silu: bool) -> Tensor:
    return x_TN * torch.sigmoid(z_TN) * (z_TN if silu else 1)


def sigmoid_gate(logit_T1: Tensor) -> Tensor:
    return torch.sigmoid(logit_T1[:, 0])


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> Tensor:
    return swiglu(h_RM) * gate_R[:, None]


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    """Every row by the weight of its expert, one row at a time."""
    rows = [(offsets_E <= r).sum() for r in range(x_RK.shape[0])]
    if not rows:
        return x_RK @ w_ENK[0].t()
    return torch.einsum("rk,rnk->rn", x_RK, w_ENK[torch.stack(rows)])


def add_bias(x_TN: Tensor, b_N: Tensor) -> Tensor:
    return x_TN + b_N


def add_grouped_bias(x_RN: Tensor, b_EN: Tensor, offsets_E: Tensor, gate_R: Tensor | None) -> Tensor:
    """Every row with the bias of its expert, one row at a time."""
    rows = [int((offsets_E <= r).sum()) for r in range(x_RN.shape[0])]
    b_RN = b_EN[rows]
    return x_RN + (b_RN if gate_R is None else gate_R[:, None] * b_RN)


def frequencies(width: int, theta: float, dtype: torch.dtype) -> Tensor:
    return theta ** -(torch.arange(0, width, 2, dtype=dtype) / width)


def turned(x_BSHR: Tensor, frequency_P: Tensor) -> Tensor:
    """RoPE on interleaved pairs."""
    angle_SP = torch.outer(torch.arange(x_BSHR.shape[1], dtype=x_BSHR.dtype), frequency_P)
    cos_SHP, sin_SHP = angle_SP.cos()[:, None], angle_SP.sin()[:, None]
    even, odd = x_BSHR[..., 0::2], x_BSHR[..., 1::2]
    return torch.stack([even * cos_SHP - odd * sin_SHP, odd * cos_SHP + even * sin_SHP], dim=-1).flatten(-2)


def rotate(
    x: Tensor,
    sequence: int,
    heads: int,
    first: int,
    width: int,
    theta: float,
    factor: float,
    low: float,
    high: float,
    original: float,
    magnitude: float,
    scale: float,
    starts: None = None,
    positions: None = None,
    stride: int = 1,
) -> Tensor:
    """Pair by pair: the share of its frequency that is divided follows a ramp over pairs or over turns. Rows `stride`
    apart rotate `stride` times as fast."""
    frequencies = []
    for i in range(width // 2):
        frequency = theta ** (-2 * i / width)
        share = (i - low) / (high - low)
        if original:
            share = (high - original * frequency / (2 * math.pi)) / (high - low)
        share = min(max(share, 0.0), 1.0)
        frequencies.append(stride * frequency * (1 - share + share / factor))
    x_BSHC = x.unflatten(0, (-1, sequence // abs(stride))).unflatten(2, (heads, -1))
    before, pairs, behind = x_BSHC.split([first, width, x_BSHC.shape[3] - first - width], dim=3)
    pairs = magnitude * turned(pairs, torch.tensor(frequencies, dtype=x.dtype))
    return scale * torch.cat([before, pairs, behind], dim=3).flatten(2).flatten(0, 1)


def mla_attention(
    q: Tensor, kv: Tensor, k_rope_TR: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> Tensor:
    """RoPE on interleaved pairs, then softmax over the whole sequence with a mask."""
    q_BSHX = q.unflatten(0, (-1, sequence)).unflatten(2, (heads, nope + rope))
    kv_BSHX = kv.unflatten(0, (-1, sequence)).unflatten(2, (heads, nope + value))
    k_rope_BSHR = k_rope_TR.unflatten(0, (-1, sequence))[:, :, None].expand(-1, -1, heads, -1)
    frequency_P = frequencies(rope, theta, q.dtype) if theta else torch.zeros(rope // 2, dtype=q.dtype)
    query = torch.cat([q_BSHX[..., :nope], turned(q_BSHX[..., nope:], frequency_P)], dim=-1)
    key = torch.cat([kv_BSHX[..., :nope], turned(k_rope_BSHR, frequency_P)], dim=-1)
    return attended(query, key, kv_BSHX[..., nope:], None, 0, 0.0)


def attended(
    q_BSHX: Tensor, k_BSHX: Tensor, v_BSHV: Tensor, sinks_H: Tensor | None, window: int, softcap: float
) -> Tensor:
    """Softmax over the whole sequence, and a column for the sinks, with a mask -> [T, H·V]."""
    S = q_BSHX.shape[1]
    scores_BHSS = torch.einsum("bqhx,bkhx->bhqk", q_BSHX, k_BSHX) * q_BSHX.shape[3] ** -0.5
    if softcap:
        scores_BHSS = softcap * torch.tanh(scores_BHSS / softcap)
    seen_SS = torch.ones(S, S, dtype=torch.bool).tril()
    if window:
        seen_SS = seen_SS.triu(1 - window)
    scores_BHSS = scores_BHSS.masked_fill(~seen_SS, -torch.inf)
    if sinks_H is not None:
        sinks_BHS1 = sinks_H[:, None, None].expand(scores_BHSS.shape[0], -1, S, 1)
        scores_BHSS = torch.cat([scores_BHSS, sinks_BHS1], dim=-1)
    share_BHSS = scores_BHSS.softmax(dim=-1)[..., :S]
    return torch.einsum("bhqk,bkhv->bqhv", share_BHSS, v_BSHV).flatten(2).flatten(0, 1)


def gqa_attention(q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float) -> Tensor:
    """Attention as latent attention of heads that are all rope: one head of keys at a time, with its queries."""
    width, r = q.shape[1] // heads, heads // kv_heads
    mixed = []
    for q_T, k_T, v_T in zip(q.split(r * width, dim=1), k.split(width, dim=1), v.split(width, dim=1), strict=True):
        values = v_T.repeat(1, r)
        mixed.append(mla_attention(q_T, values, k_T, sequence, r, 0, width, width, theta))
    return torch.cat(mixed, dim=1)


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
) -> Tensor:
    """Keys and values repeated for every query head."""
    width = q.shape[1] // heads
    frequency_P = frequencies(width, theta, q.dtype) if theta else torch.zeros(width // 2, dtype=q.dtype)
    q_BSHC, k_BSGC, v_BSGC = (x.unflatten(0, (-1, sequence)).unflatten(2, (-1, width)) for x in (q, k, v))
    k_BSHC, v_BSHC = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k_BSGC, v_BSGC))
    return attended(turned(q_BSHC, frequency_P), turned(k_BSHC, frequency_P), v_BSHC, sinks, window, softcap)


def head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> Tensor:
    return rmsnorm(x_TW.unflatten(1, (-1, len(w_C))).flatten(0, 1), w_C, eps).view_as(x_TW)


def two_squares(x_TW: Tensor, first: int, second: int) -> Tensor:
    squares_TW = x_TW * x_TW
    return torch.stack([squares_TW[:, :first].sum(1), squares_TW[:, first : first + second].sum(1)], dim=1)


def shared_rmsnorm(x_TW: Tensor, w_W: Tensor, squares_T1: Tensor, width: int, eps: float) -> Tensor:
    return x_TW * torch.rsqrt(squares_T1 / width + eps) * w_W


def scores(logits: Tensor, softmax: bool) -> Tensor:
    return torch.softmax(logits, dim=1) if softmax else torch.sigmoid(logits)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return chosen_of(
        scores(logits_TE, softmax), bias_E, 1 if softmax else 2, groups, top_groups, top_k, normalize, scale
    )


def sqrt_softplus(logits_TE: Tensor) -> Tensor:
    return torch.log1p(torch.exp(logits_TE)) ** 0.5


def route_scores(
    score_TE: Tensor,
    bias_E: Tensor | None,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return chosen_of(score_TE, bias_E, 2, groups, top_groups, top_k, normalize, scale)


def replay_choices(expert_TK: Tensor, given_TK: Tensor) -> Tensor:
    rows = zip(expert_TK.tolist(), given_TK.tolist(), strict=True)
    return torch.tensor([[old if old >= 0 else new for new, old in zip(*row, strict=True)] for row in rows])


def table_choices(tokens_T: Tensor, table_VK: Tensor) -> Tensor:
    return torch.stack([table_VK[token].long() for token in tokens_T.tolist()])


def weigh_chosen(logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    return weigh_chosen_scores(scores(logits_TE, softmax), expert_TK, normalize, scale)


def weigh_chosen_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    gate_TK = score_TE.gather(1, expert_TK)
    if normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=1, keepdim=True) + 1e-20)
    return gate_TK * scale


def chosen_of(
    score_TE: Tensor,
    bias_E: Tensor | None,
    counted: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Token by token. `counted`: the number of best experts of a group that sum up to its score."""
    chosen = []
    for biased_E in (score_TE if bias_E is None else score_TE + bias_E).detach():
        by_group = biased_E.view(groups, -1)
        best = by_group.sort(dim=1, descending=True).values[:, :counted].sum(dim=1)
        best_groups = best.argsort(descending=True)[:top_groups].tolist()
        size = by_group.shape[1]
        allowed = [e for e in range(len(biased_E)) if e // size in best_groups]
        chosen.append(sorted(allowed, key=lambda e: -float(biased_E[e]))[:top_k])
    expert_TK = torch.tensor(chosen)
    gate_TK = score_TE.gather(1, expert_TK)
    if normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=1, keepdim=True) + 1e-20)
    return gate_TK * scale, expert_TK


def sequence_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    return balance_scores(scores(logits_TE, softmax), expert_TK, sequence)


def choice_counts(expert_TK: Tensor, num_experts: int, rows: int) -> Tensor:
    """By one-hot rows."""
    return torch.nn.functional.one_hot(expert_TK, num_experts).sum(1).view(-1, rows, num_experts).sum(1)


def counted_balance(logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool) -> Tensor:
    return counted_balance_scores(scores(logits_TE, softmax), counts_NE, rows, sequence)


def counted_balance_scores(score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int) -> Tensor:
    """Row by row, with the counts of all ranks."""
    B, E = len(score_TE) // rows, score_TE.shape[1]
    counts_BE = counts_NE.view(-1, B, E).sum(0).to(score_TE.dtype)
    frequency_BE = E * counts_BE / counts_BE.sum(1, keepdim=True)
    share_TE = score_TE / score_TE.sum(1, keepdim=True)
    return (
        sum(((share_TE[t] * frequency_BE[t // rows]).sum() for t in range(len(score_TE))), score_TE.new_zeros(()))
        / sequence
    )


def balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    E, K = score_TE.shape[1], expert_TK.shape[1]
    total = score_TE.new_zeros(())
    for score_SE, expert_SK in zip(score_TE.split(sequence), expert_TK.split(sequence), strict=True):
        share_E = (score_SE / score_SE.sum(dim=1, keepdim=True)).mean(dim=0)
        count_E = functional.one_hot(expert_SK, E).sum(dim=(0, 1))
        total = total + (share_E * count_E * E / (K * sequence)).sum()
    return total


def permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = expert_TK.flatten().tolist()
    order = sorted(range(len(chosen)), key=lambda place: chosen[place])
    order_S = torch.tensor(order)
    counts_E = torch.tensor([chosen.count(e) for e in range(num_experts)])
    return x_TD[order_S // expert_TK.shape[1]], gate_TK.flatten()[order_S], order_S, counts_E


def linear_detached(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return functional.linear(x_TK.detach(), w_NK)


def center(x_TN: Tensor) -> Tensor:
    return x_TN - x_TN.mean(dim=1, keepdim=True)


def unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    return y_SD[order_S.argsort()].unflatten(0, (-1, top_k)).sum(dim=1)
