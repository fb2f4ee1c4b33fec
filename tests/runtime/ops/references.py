"""Slow references of all ops, by other formulas, differentiable by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.runtime.ops.indexer_references import chosen_attention, indexer_loss
from tests.runtime.ops.references_attention import bounded_attention, gqa_attention, mla_attention, rotate
from tests.runtime.ops.references_compress import block_linear, compress, compressed_attention, unweighted_rmsnorm
from tests.runtime.ops.references_delta import convolve, delta_rule, log_decay
from tests.runtime.ops.routing_references import (
    balance_scores,
    blank_rows,
    counted_balance,
    counted_balance_scores,
    permute,
    permute_placed,
    real_balance,
    real_balance_scores,
    route,
    route_scores,
    sequence_balance,
    sigmoid_gate,
    slice_choices,
    sqrt_softplus,
    unpermute,
    weigh_chosen,
    weigh_chosen_scores,
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
    """An additional last row is for tokens that the table does not have."""
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


def add_bias(x_TN: Tensor, b_N: Tensor) -> Tensor:
    return torch.stack([row + b_N for row in x_TN])


def head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> Tensor:
    return torch.cat([rmsnorm(x_TC, w_C, eps) for x_TC in x_TW.split(w_C.shape[0], dim=1)], dim=1)


def two_squares(x_TW: Tensor, first: int, second: int) -> Tensor:
    return torch.stack([torch.einsum("tw,tw->t", x, x) for x in x_TW[:, : first + second].split((first, second), 1)], 1)


def shared_rmsnorm(x_TW: Tensor, w_W: Tensor, squares_T1: Tensor, width: int, eps: float) -> Tensor:
    return x_TW / torch.sqrt(squares_T1 / width + eps) * w_W


def grouped_linear(x_RK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    rows = torch.arange(x_RK.shape[0], dtype=torch.int32)
    expert_R = (rows[:, None] >= offsets_E[None, :]).sum(1)
    return torch.einsum("rk,rnk->rn", x_RK, w_ENK[expert_R])


def cdf(x: Tensor, *, tanh: bool) -> Tensor:
    """The cumulative normal distribution at x, by erf or by its tanh approximation."""
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


def gate_columns(x_TN: Tensor, z_TN: Tensor, silu: bool) -> Tensor:
    return x_TN * (z_TN if silu else 1) / (1 + torch.exp(-z_TN))


def gate_rows(x_RI: Tensor, gate_R: Tensor) -> Tensor:
    return torch.diag(gate_R) @ x_RI


def hyper_products(h_TN: Tensor, fn_MN: Tensor, eps: float) -> Tensor:
    return torch.einsum("tk,mk->tm", rmsnorm(h_TN, torch.ones_like(h_TN[0]), eps), fn_MN)


def scale_parts(x_TM: Tensor, scale_S: Tensor) -> Tensor:
    return torch.cat([x_TM[:, :3] * scale_S[0], x_TM[:, 3:6] * scale_S[1], x_TM[:, 6:] * scale_S[2]], dim=1)


def hyper_mix(h_TN: Tensor, logits_TM: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, for three streams."""
    xs, posts, combs = [], [], []
    for h_N, logits_M in zip(h_TN, logits_TM, strict=True):
        comb = torch.exp(logits_M[6:].view(3, 3))
        comb = comb / comb.sum(1, keepdim=True) + eps
        for number in range(rounds):
            if number > 0:
                comb = torch.stack([row / (row.sum() + eps) for row in comb])
            comb = torch.stack([column / (column.sum() + eps) for column in comb.T]).T
        xs.append((1 / (1 + torch.exp(-logits_M[:3])) + eps) @ h_N.view(3, -1))
        posts.append(2 / (1 + torch.exp(-logits_M[3:6])))
        combs.append(comb.flatten())
    return torch.stack(xs), torch.stack(posts), torch.stack(combs)


def hyper_add(h_TN: Tensor, y_TD: Tensor, post_Tn: Tensor, comb_TC: Tensor) -> Tensor:
    n = post_Tn.shape[1]
    mixed = torch.einsum("tik,tid->tkd", comb_TC.unflatten(1, (n, n)), h_TN.unflatten(1, (n, -1)))
    return (torch.einsum("tk,td->tkd", post_Tn, y_TD) + mixed).flatten(1)


def policy_loss(
    logits_TV: Tensor,
    targets_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    weight_T: Tensor,
    reference_T: Tensor | None,
    low: float,
    high: float,
    kl: float,
    corrected: bool,
) -> Tensor:
    """Token by token, by cases: a ratio beyond its bound is the bound if that makes the objective smaller."""
    total = logits_TV.new_zeros(())
    for t in (targets_T >= 0).nonzero().flatten().tolist():
        p_V = logits_TV[t].exp() / logits_TV[t].exp().sum()
        p, advantage = p_V[targets_T[t]], advantage_T[t]
        ratio = p / old_T[t].exp()
        bound = 1 + high if advantage > 0 else 1 - low
        is_clipped = bool(ratio > bound) if advantage > 0 else bool(ratio < bound)
        loss = -advantage * (bound if is_clipped else ratio)
        if reference_T is not None:
            q = reference_T[t].exp()
            loss = loss + kl * (ratio if corrected else 1) * (q / p - torch.log(q / p) - 1)
        total = total + weight_T[t] * loss
    return total


REFERENCES: dict[str, Callable[..., Any]] = {
    "add_bias": add_bias,
    "block_linear": block_linear,
    "bounded_attention": bounded_attention,
    "bounded_attention_peaks": bounded_attention,
    "compress": compress,
    "compressed_attention": compressed_attention,
    "balance_scores": balance_scores,
    "center": lambda x_TN: x_TN - torch.einsum("tn->t", x_TN)[:, None] / x_TN.shape[1],
    "chosen_attention": chosen_attention,
    "clamped_swiglu": clamped_swiglu,
    "gate_rows": gate_rows,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, tanh=True),
    "gelu": lambda h_TI: h_TI * cdf(h_TI, tanh=False),
    "gelu_tanh": lambda h_TI: h_TI * cdf(h_TI, tanh=True),
    "relu2": lambda h_TI: torch.where(h_TI > 0, h_TI * h_TI, 0.0),
    "route_scores": route_scores,
    "hyper_add": hyper_add,
    "hyper_collapse": lambda h_TN, logits_Tn, eps: torch.einsum(
        "tn,tnd->td", 1 / (1 + torch.exp(-logits_Tn)) + eps, h_TN.unflatten(1, (logits_Tn.shape[1], -1))
    ),
    "hyper_copy": lambda x_TD, streams: torch.cat([x_TD] * streams, dim=1),
    "hyper_mix": hyper_mix,
    "hyper_products": hyper_products,
    "scale_parts": scale_parts,
    "scale": lambda x_TN, factor: x_TN + (factor - 1) * x_TN,
    "slice_choices": slice_choices,
    "sigmoid_gate": sigmoid_gate,
    "softcap": lambda x_TN, cap: cap * (torch.exp(2 * x_TN / cap) - 1) / (torch.exp(2 * x_TN / cap) + 1),
    "sqrt_softplus": sqrt_softplus,
    "convolve": convolve,
    "cross_entropy": cross_entropy,
    "cross_entropy_of_parts": cross_entropy_of_parts,
    "cross_entropy_part": cross_entropy_part,
    "delta_rule": delta_rule,
    "embedding": embedding,
    "weigh_chosen": weigh_chosen,
    "weigh_chosen_scores": weigh_chosen_scores,
    "gate_columns": gate_columns,
    "gated_swiglu": gated_swiglu,
    "gqa_attention": gqa_attention,
    "gqa_attention_peaks": gqa_attention,
    "add_grouped_bias": add_grouped_bias,
    "grouped_linear": grouped_linear,
    "head_rmsnorm": head_rmsnorm,
    "indexer_loss": indexer_loss,
    "linear": linear,
    "linear_detached": linear,
    "log_decay": log_decay,
    "linear_wide": linear,
    "mla_attention": mla_attention,
    "mla_attention_peaks": mla_attention,
    "permute": permute,
    "permute_placed": permute_placed,
    "place_parts": place_parts,
    "rmsnorm": rmsnorm,
    "policy_loss": policy_loss,
    "two_squares": two_squares,
    "shared_rmsnorm": shared_rmsnorm,
    "rotate": rotate,
    "route": route,
    "counted_balance": counted_balance,
    "counted_balance_scores": counted_balance_scores,
    "blank_rows": blank_rows,
    "real_balance": real_balance,
    "real_balance_scores": real_balance_scores,
    "sequence_balance": sequence_balance,
    "swiglu": swiglu,
    "unpermute": unpermute,
    "unweighted_rmsnorm": unweighted_rmsnorm,
}
