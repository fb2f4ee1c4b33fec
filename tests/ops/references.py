"""Every op written again, slowly and by another formula, for torch's own autograd to differentiate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.ops.routing_references import (
    balance_scores,
    permute,
    permute_placed,
    route,
    route_scores,
    sequence_balance,
    sigmoid_gate,
    slice_choices,
    sqrt_softplus,
    unpermute,
)


def linear(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    return torch.einsum("tk,nk->tn", x_TK, w_NK)


def rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    return x_TD / ((x_TD**2).sum(1, keepdim=True) / x_TD.shape[1] + eps) ** 0.5 * w_D


def swiglu(h_TM: Tensor) -> Tensor:
    g_TI, u_TI = h_TM[:, : h_TM.shape[1] // 2], h_TM[:, h_TM.shape[1] // 2 :]
    return g_TI / (1 + torch.exp(-g_TI)) * u_TI


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> Tensor:
    return torch.einsum("ri,r->ri", swiglu(h_RM), gate_R)


def embedding(tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    """The last of one column more is of tokens that the table does not have."""
    onehot_TV = functional.one_hot(torch.where(tokens_T < 0, w_VD.shape[0], tokens_T), w_VD.shape[0] + 1)
    return onehot_TV[:, :-1].to(w_VD.dtype) @ w_VD


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    void_T = torch.where(targets_T < 0, -100, targets_T)
    return functional.cross_entropy(logits_TV, void_T, ignore_index=-100, reduction="sum")


def cross_entropy_part(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    return logits_TV.exp().sum(dim=1).log(), embedding(targets_T, logits_TV.T).diagonal()


def place_parts(lse_T: Tensor, picked_T: Tensor, rank: Tensor, ranks: int) -> Tensor:
    columns = [lse_T if index == int(rank) else torch.zeros_like(lse_T) for index in range(ranks)]
    return torch.stack([*columns, picked_T], dim=1)


def cross_entropy_of_parts(parts: Tensor, targets_T: Tensor) -> Tensor:
    nats_T = parts[:, :-1].exp().sum(dim=1).log() - parts[:, -1]
    return nats_T[targets_T >= 0].sum()


def by_document(op: Callable[..., Tensor], tensors: tuple[Tensor, ...], starts: Tensor, sequence: int) -> Tensor:
    """The op on each document by itself. `op` takes the rows of `tensors` that are a document's, and their number."""
    firsts = [t for t, start in enumerate(starts.tolist()) if t % sequence == start]
    ends = [*firsts[1:], len(starts)]
    rows = [op(*(x[first:end] for x in tensors), end - first) for first, end in zip(firsts, ends, strict=True)]
    return torch.cat(rows)


def turn(x: Tensor, theta: float) -> Tensor:
    """RoPE of x [B, S, H, rope] by a rotation matrix for every position and pair."""
    rope = x.shape[3]
    turned = torch.zeros_like(x)
    for position in range(x.shape[1]):
        for pair in range(rope // 2):
            angle = torch.tensor(position * theta ** (-2 * pair / rope), dtype=torch.float64)
            cos, sin = angle.cos(), angle.sin()
            rotation = torch.stack((torch.stack((cos, -sin)), torch.stack((sin, cos)))).to(x.dtype)
            of_pair = slice(2 * pair, 2 * pair + 2)
            turned[:, position, :, of_pair] = x[:, position, :, of_pair] @ rotation.T
    return turned


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
) -> Tensor:
    if starts is not None:
        alone = lambda q, kv, k_rope, size: mla_attention(q, kv, k_rope, size, heads, nope, rope, value, theta)  # noqa: E731
        return by_document(alone, (q, kv, k_rope), starts, sequence)
    q_BSHC = q.reshape(-1, sequence, heads, nope + rope)
    kv_BSHW = kv.reshape(-1, sequence, heads, nope + value)
    q_rope = turn(q_BSHC[..., nope:], theta)
    shared = turn(k_rope.reshape(-1, sequence, 1, rope), theta)[:, :, 0]
    scores = torch.einsum("bqhc,bkhc->bhqk", q_BSHC[..., :nope], kv_BSHW[..., :nope])
    scores = (scores + torch.einsum("bqhc,bkc->bhqk", q_rope, shared)) / (nope + rope) ** 0.5
    future = torch.arange(sequence)[None, :] > torch.arange(sequence)[:, None]
    weights = functional.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
    return torch.einsum("bhqk,bkhv->bqhv", weights, kv_BSHW[..., nope:]).reshape(q.shape[0], heads * value)


def gqa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: int,
    heads: int,
    kv_heads: int,
    theta: float,
    starts: Tensor | None = None,
) -> Tensor:
    """Query head by query head."""
    if starts is not None:
        alone = lambda q, k, v, size: gqa_attention(q, k, v, size, heads, kv_heads, theta)  # noqa: E731
        return by_document(alone, (q, k, v), starts, sequence)
    q_BSHC = turn(q.reshape(-1, sequence, heads, q.shape[1] // heads), theta)
    k_BSGC = turn(k.reshape(-1, sequence, kv_heads, k.shape[1] // kv_heads), theta)
    v_BSGC = v.reshape(k_BSGC.shape)
    mixed = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = q_BSHC[:, :, head] @ k_BSGC[:, :, shared].mT / q_BSHC.shape[3] ** 0.5
        future = torch.arange(sequence)[None, :] > torch.arange(sequence)[:, None]
        mixed.append(functional.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v_BSGC[:, :, shared])
    return torch.cat(mixed, dim=-1).reshape(q.shape)


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
) -> Tensor:
    """Query by query, over the keys that it sees."""
    if starts is not None:
        how = heads, kv_heads, theta, window, softcap
        alone = lambda q, k, v, size: bounded_attention(q, k, v, sinks, size, *how)  # noqa: E731
        return by_document(alone, (q, k, v), starts, sequence)
    q_BSHC = q.reshape(-1, sequence, heads, q.shape[1] // heads)
    k_BSGC = k.reshape(-1, sequence, kv_heads, k.shape[1] // kv_heads)
    if theta:
        q_BSHC, k_BSGC = turn(q_BSHC, theta), turn(k_BSGC, theta)
    v_BSGC = v.reshape(k_BSGC.shape)
    found = []
    for position in range(sequence):
        first = max(0, position + 1 - window) if window else 0
        heads_BC = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            keys_BKC, values_BKC = k_BSGC[:, first : position + 1, shared], v_BSGC[:, first : position + 1, shared]
            logits_BK = torch.einsum("bc,bkc->bk", q_BSHC[:, position, head], keys_BKC) / q_BSHC.shape[3] ** 0.5
            if softcap:
                logits_BK = softcap * torch.tanh(logits_BK / softcap)
            weights_BK = torch.exp(logits_BK)
            total_B1 = weights_BK.sum(1, keepdim=True)
            if sinks is not None:
                total_B1 = total_B1 + torch.exp(sinks[head])
            heads_BC.append(torch.einsum("bk,bkc->bc", weights_BK / total_B1, values_BKC))
        found.append(torch.cat(heads_BC, dim=1))
    return torch.stack(found, dim=1).reshape(q.shape)


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
    starts: Tensor | None = None,
) -> Tensor:
    """A matrix for every position, of rotations by the angle of each pair."""
    if starts is not None:
        how = heads, first, width, theta, factor, low, high, original, magnitude, scale
        return by_document(lambda x, size: rotate(x, size, *how), (x,), starts, sequence)
    C = x.shape[1] // heads
    x_BSHC = x.reshape(-1, sequence, heads, C)
    rows = []
    for position in range(sequence):
        matrix = torch.eye(C, dtype=torch.float64)
        for pair in range(width // 2):
            frequency = theta ** (-2 * pair / width)
            at = original * frequency / (2 * torch.pi) if original else pair
            share = min(1.0, max(0.0, (at - low) / (high - low)))
            divided = 1 - share if original else share
            turned = position * (divided * frequency / factor + (1 - divided) * frequency)
            angle = torch.tensor(turned, dtype=torch.float64)
            block = torch.stack((torch.stack((angle.cos(), -angle.sin())), torch.stack((angle.sin(), angle.cos()))))
            of_pair = slice(first + 2 * pair, first + 2 * pair + 2)
            matrix[of_pair, of_pair] = magnitude * block
        rows.append(scale * x_BSHC[:, position] @ matrix.to(x.dtype).T)
    return torch.stack(rows, dim=1).reshape(x.shape)


def add_bias(x_TN: Tensor, b_N: Tensor) -> Tensor:
    return torch.stack([row + b_N for row in x_TN])


def head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> Tensor:
    return torch.cat([rmsnorm(x_TC, w_C, eps) for x_TC in x_TW.split(w_C.shape[0], dim=1)], dim=1)


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    rows = torch.arange(x_RK.shape[0], dtype=torch.int32)
    expert_R = (rows[:, None] >= offsets_E[None, :]).sum(1)
    return torch.einsum("rk,rnk->rn", x_RK, w_ENK[expert_R])


def cdf(x: Tensor, *, tanh: bool) -> Tensor:
    """The share of the normal distribution below x: by erf, or by the approximation of it."""
    if tanh:
        return (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
    return (1 + torch.erf(x / 2**0.5)) / 2


def geglu(h_TM: Tensor, *, tanh: bool = False) -> Tensor:
    g_TI, u_TI = h_TM[:, : h_TM.shape[1] // 2], h_TM[:, h_TM.shape[1] // 2 :]
    return g_TI * cdf(g_TI, tanh=tanh) * u_TI


def clamped_swiglu(h_TM: Tensor, limit: float, alpha: float, shift: float) -> Tensor:
    g_TI, u_TI = h_TM[:, : h_TM.shape[1] // 2], h_TM[:, h_TM.shape[1] // 2 :]
    g_TI = torch.where(g_TI > limit, limit, g_TI)
    u_TI = torch.where(u_TI > limit, limit, torch.where(u_TI < -limit, -limit, u_TI))
    return g_TI / (1 + torch.exp(-alpha * g_TI)) * (u_TI + shift)


def add_grouped_bias(x_RN: Tensor, b_EN: Tensor, offsets_E: Tensor, gate_R: Tensor | None) -> Tensor:
    """Group by group."""
    groups, start = [], 0
    for b_N, end in zip(b_EN, offsets_E.tolist(), strict=True):
        gate_r = torch.ones(end - start, dtype=x_RN.dtype) if gate_R is None else gate_R[start:end]
        groups.append(x_RN[start:end] + torch.outer(gate_r, b_N))
        start = end
    return torch.cat(groups)


def gate_rows(x_RI: Tensor, gate_R: Tensor) -> Tensor:
    return torch.diag(gate_R) @ x_RI


REFERENCES: dict[str, Callable[..., Any]] = {
    "add_bias": add_bias,
    "bounded_attention": bounded_attention,
    "balance_scores": balance_scores,
    "clamped_swiglu": clamped_swiglu,
    "gate_rows": gate_rows,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, tanh=True),
    "gelu": lambda h_TI: h_TI * cdf(h_TI, tanh=False),
    "gelu_tanh": lambda h_TI: h_TI * cdf(h_TI, tanh=True),
    "relu2": lambda h_TI: torch.where(h_TI > 0, h_TI * h_TI, 0.0),
    "route_scores": route_scores,
    "scale": lambda x_TN, factor: x_TN + (factor - 1) * x_TN,
    "slice_choices": slice_choices,
    "sigmoid_gate": sigmoid_gate,
    "softcap": lambda x_TN, cap: cap * (torch.exp(2 * x_TN / cap) - 1) / (torch.exp(2 * x_TN / cap) + 1),
    "sqrt_softplus": sqrt_softplus,
    "cross_entropy": cross_entropy,
    "cross_entropy_of_parts": cross_entropy_of_parts,
    "cross_entropy_part": cross_entropy_part,
    "embedding": embedding,
    "gated_swiglu": gated_swiglu,
    "gqa_attention": gqa_attention,
    "add_grouped_bias": add_grouped_bias,
    "grouped_linear": grouped_linear,
    "head_rmsnorm": head_rmsnorm,
    "linear": linear,
    "linear_wide": linear,
    "mla_attention": mla_attention,
    "permute": permute,
    "permute_placed": permute_placed,
    "place_parts": place_parts,
    "rmsnorm": rmsnorm,
    "rotate": rotate,
    "route": route,
    "sequence_balance": sequence_balance,
    "swiglu": swiglu,
    "unpermute": unpermute,
}
