"""References of the ops of routing: token by token, with Python's sort and lists."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def scores(logits: Tensor, softmax: bool) -> Tensor:
    """Scores over the last dim: softmax or sigmoid."""
    return torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True) if softmax else 1 / (1 + torch.exp(-logits))


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
    num_best = 1 if softmax else 2
    return chosen(scores(logits_TE, softmax), bias_E, num_best, groups, top_groups, top_k, normalize, scale)


def chosen(
    score_TE: Tensor,
    bias_E: Tensor | None,
    num_best: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Token by token, with Python's sort; experts of a token in descending order of score + bias."""
    size = score_TE.shape[1] // groups
    gates, experts = [], []
    for score_E in score_TE:
        choice = (score_E if bias_E is None else score_E + bias_E).tolist()
        best = [sum(sorted(choice[group * size : (group + 1) * size])[-num_best:]) for group in range(groups)]
        best_groups = sorted(range(groups), key=lambda group, best=best: -best[group])[:top_groups]
        candidates = [expert for expert in range(len(choice)) if expert // size in best_groups]
        best_ones = sorted(candidates, key=lambda expert, values=choice: -values[expert])[:top_k]
        gate_K = score_E[best_ones]
        gates.append((gate_K / (gate_K.sum() + 1e-20) if normalize else gate_K) * scale)
        experts.append(best_ones)
    return torch.stack(gates), torch.tensor(experts)


def sequence_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    return sequence_loss(scores(logits_TE, softmax), expert_TK, sequence)


def counted_balance(logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool) -> Tensor:
    return counted_balance_scores(scores(logits_TE, softmax), counts_NE, rows, sequence)


def counted_balance_scores(score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int) -> Tensor:
    (T, E), loss = score_TE.shape, score_TE.new_zeros(())
    for b in range(T // rows):
        score_nE, of_all = score_TE[b * rows : (b + 1) * rows], counts_NE[b :: T // rows].tolist()
        total = sum(map(sum, of_all))
        for expert in range(E):
            frequency = E * sum(counts_E[expert] for counts_E in of_all) / total
            loss = loss + frequency * (score_nE[:, expert] / score_nE.sum(1)).sum() / sequence
    return loss


def blank_rows(x_TN: Tensor, real_T: Tensor) -> Tensor:
    return torch.stack([row_N if real else 0 * row_N for row_N, real in zip(x_TN, real_T.tolist(), strict=True)])


def real_balance(logits_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, softmax: bool) -> Tensor:
    return real_balance_scores(scores(logits_TE, softmax), counts_NE, real_T, rows, top_k)


def real_balance_scores(score_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int) -> Tensor:
    """Sequence by sequence, the loss over its real tokens, whose number over all ranks follows from the counts."""
    (T, E), loss = score_TE.shape, score_TE.new_zeros(())
    for b in range(T // rows):
        real = [t for t in range(b * rows, (b + 1) * rows) if real_T[t]]
        counts_E = counts_NE[b :: T // rows].sum(0).tolist()
        tokens = sum(counts_E) / top_k
        for expert in range(E) if real else ():
            share = (score_TE[real, expert] / score_TE[real].sum(1)).sum()
            loss = loss + E / (top_k * tokens) * counts_E[expert] * share / tokens
    return loss


def sequence_loss(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    (T, E), K = score_TE.shape, expert_TK.shape[1]
    loss = score_TE.new_zeros(())
    for start in range(0, T, sequence):
        score_SE = score_TE[start : start + sequence]
        chosen = expert_TK[start : start + sequence].flatten().tolist()
        for expert in range(E):
            frequency = E / (K * sequence) * chosen.count(expert)
            loss = loss + frequency * (score_SE[:, expert] / score_SE.sum(1)).mean()
    return loss


def permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top_k, chosen = expert_TK.shape[1], expert_TK.flatten().tolist()
    order = sorted(range(len(chosen)), key=lambda choice: (chosen[choice], choice))
    rows = torch.stack([x_TD[choice // top_k] for choice in order])
    gates = torch.stack([gate_TK[choice // top_k, choice % top_k] for choice in order])
    return rows, gates, torch.tensor(order), torch.tensor([chosen.count(expert) for expert in range(num_experts)])


def permute_placed(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    places = [[int(slots_E[expert]) for expert in row] for row in expert_TK.tolist()]
    return permute(x_TD, gate_TK, torch.tensor(places).reshape(expert_TK.shape), len(slots_E))


def slice_choices(
    gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor, slices: int, apart: int
) -> tuple[Tensor, Tensor]:
    gates = torch.stack([gate for gate in gate_TK.unbind(1) for _ in range(slices)], 1)
    places = [[int(slots_E[e]) + j * apart for e in row for j in range(slices)] for row in expert_TK.tolist()]
    return gates, torch.tensor(places).reshape(gates.shape)


def unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    back = functional.one_hot(order_S // top_k, y_SD.shape[0] // top_k).to(y_SD.dtype)
    return back.T @ y_SD


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
    return chosen(score_TE, bias_E, 2, groups, top_groups, top_k, normalize, scale)


def balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    return sequence_loss(score_TE, expert_TK, sequence)


def sigmoid_gate(logit_T1: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-logit_T1.flatten()))


def weigh_chosen(logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    score_TE = logits_TE.exp() / logits_TE.exp().sum(1, keepdim=True) if softmax else 1 / (1 + (-logits_TE).exp())
    return weigh_chosen_scores(score_TE, expert_TK, normalize, scale)


def weigh_chosen_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    chosen_TK = torch.stack([row[choices] for row, choices in zip(score_TE, expert_TK, strict=True)])
    return scale * chosen_TK / (chosen_TK.sum(1, keepdim=True) if normalize else 1)
