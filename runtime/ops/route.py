"""Choosing experts: scores, groups of experts, and a bias that steers the choice alone.

With sigmoid scores as DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2; with softmax scores as
"DeepSeek-V2", 2024, section 2.1.3, and its published code. T tokens, E experts, K choices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

THRESHOLD = 40.0  # softplus(x) is x to the bit of FP64 above 37
TINY = 1e-20  # V2 and V3 add it to the sum of the chosen scores
WHOLE = 64  # elements that torch computes together, at most: two vectors of 512 bits of BF16


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
    """logits_TE, bias_E or None -> gate_TK, expert_TK (int64).

    The scores are the softmax over all experts, or the sigmoid of each. Experts are chosen by score + bias among the
    `top_groups` groups with the largest group scores: the best expert's (softmax), the sum of the two best (sigmoid;
    of one, where the group has one). Of equals the first is better, and NaN is better than all numbers. The bias is
    finite. The gate weight is the score without bias, divided by the sum of the chosen if `normalize`, times `scale`.
    """
    counted = 1 if softmax else 2
    return _chosen(scores(logits_TE, softmax), bias_E, counted, groups, top_groups, top_k, normalize, scale)


def _chosen(
    score_TE: Tensor,
    bias_E: Tensor | None,
    counted: int,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK of scores. `counted`: the best experts whose sum is the score of their group."""
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    expert_TK = best(_among_best_groups(choice_TE, groups, top_groups, counted), top_k)
    return weigh_chosen_scores(score_TE, expert_TK, normalize, scale), expert_TK


def scores(logits_TE: Tensor, softmax: bool) -> Tensor:
    """logits_TE -> score_TE, in their dtype."""
    return torch.softmax(logits_TE, dim=-1) if softmax else sigmoid(logits_TE)


def by_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of each element, of the same bits wherever it is. torch computes what is left behind the last whole
    vectors of a tensor in another way, so here nothing is left."""
    left = -x.numel() % WHOLE
    if not left or not x.is_cpu:
        return function(x)
    return function(functional.pad(x.reshape(-1), (0, left)))[: x.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of each element, by `by_element`."""
    return by_element(torch.sigmoid, x)


def best(x_TE: Tensor, num: int) -> Tensor:
    """x_TE -> index_TN (int64) of the `num` largest of each row, in descending order, and of equals in ascending order.

    `topk` takes equals in any order, and sorting stably takes 5 times as long: 8.4 and 36 ms, this 6.5 (T 4096, E 256,
    num 8, FP32, one core).
    """
    left_TE, found = x_TE.clone(), []
    for _ in range(num):
        found.append(left_TE.max(dim=-1, keepdim=True).indices)  # the first of equals
        left_TE.scatter_(1, found[-1], -torch.inf)
    return torch.cat(found, dim=1)


def _among_best_groups(choice_TE: Tensor, groups: int, top_groups: int, num_best: int) -> Tensor:
    """choice_TE with −inf in all but the `top_groups` of its `groups` whose `num_best` best have the largest sum."""
    if top_groups == groups:
        return choice_TE
    choice_TGM = choice_TE.unflatten(1, (groups, -1))
    best_TG = choice_TGM.topk(min(num_best, choice_TGM.shape[2]), dim=-1).values.sum(dim=-1)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, best(best_TG, top_groups), False)
    return choice_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)


def route_dgrad(
    dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float
) -> Tensor:
    """dgate_TK, logits_TE, expert_TK -> dlogits_TE. The choice has no gradient."""
    score_TE = scores(logits_TE, softmax)
    score_TK = score_TE.gather(1, expert_TK)
    dlogits_TK = _dscore(dgate_TK, score_TK, normalize, scale) * score_TK
    if not softmax:
        dlogits_TK *= 1 - score_TK
        return torch.zeros_like(logits_TE).scatter_(1, expert_TK, dlogits_TK)  # the K experts of a token are distinct
    dlogits_TE = score_TE * -dlogits_TK.sum(dim=-1, keepdim=True)
    return dlogits_TE.scatter_add_(1, expert_TK, dlogits_TK)


def _dscore(dgate_TK: Tensor, score_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK and the chosen scores -> their gradient dscore_TK."""
    dscore_TK = dgate_TK * scale
    if not normalize:
        return dscore_TK
    total_T1 = score_TK.sum(dim=-1, keepdim=True) + TINY
    mean_T1 = (dscore_TK * score_TK).sum(dim=-1, keepdim=True) / total_T1
    return (dscore_TK - mean_T1) / total_T1


# ---------------------------------------------------------------- scores of another kind


def sqrt_softplus(logits_TE: Tensor) -> Tensor:
    """logits_TE -> score_TE = √log(1 + e^logit), the scores of DeepSeek-V4."""
    return by_element(lambda x: functional.softplus(x, threshold=THRESHOLD).sqrt_(), logits_TE)


def sqrt_softplus_dgrad(dscore_TE: Tensor, logits_TE: Tensor, score_TE: Tensor) -> Tensor:
    """dscore_TE, logits_TE, score_TE -> dlogits_TE = dscore·sigmoid(logit) / (2·score); 0 where the score is 0."""
    slope_TE = torch.sigmoid(logits_TE).div_(2 * score_TE).masked_fill_(score_TE == 0, 0)
    return slope_TE.mul_(dscore_TE)


def route_scores(
    score_TE: Tensor,
    bias_E: Tensor | None,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """score_TE, bias_E or None -> gate_TK, expert_TK (int64): `route` of scores that are given, as with sigmoid."""
    return _chosen(score_TE, bias_E, 2, groups, top_groups, top_k, normalize, scale)


def route_scores_dgrad(dgate_TK: Tensor, score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK, score_TE, expert_TK -> dscore_TE."""
    dscore_TK = _dscore(dgate_TK, score_TE.gather(1, expert_TK), normalize, scale)
    return torch.zeros_like(score_TE).scatter_(1, expert_TK, dscore_TK)


# ---------------------------------------------------------------- experts that are chosen already


def replay_choices(expert_TK: Tensor, given_TK: Tensor) -> Tensor:
    """expert_TK, given_TK (int64) -> expert_TK, the given ones where these are not below 0."""
    return torch.where(given_TK >= 0, given_TK, expert_TK)


def table_choices(tokens_T: Tensor, table_VK: Tensor) -> Tensor:
    """tokens_T (int64), table_VK (int32) -> expert_TK (int64), the rows of the table by token."""
    return table_VK.index_select(0, tokens_T).long()


def weigh_chosen(logits_TE: Tensor, expert_TK: Tensor, softmax: bool, normalize: bool, scale: float) -> Tensor:
    """logits_TE, expert_TK -> gate_TK, the weights that `route` gives experts that are chosen already."""
    return weigh_chosen_scores(scores(logits_TE, softmax), expert_TK, normalize, scale)


def weigh_chosen_scores(score_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """score_TE, expert_TK -> gate_TK, likewise of scores that are given."""
    gate_TK = score_TE.gather(1, expert_TK)
    if normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=-1, keepdim=True) + TINY)
    return gate_TK * scale


# ---------------------------------------------------------------- gates of shared experts


def sigmoid_gate(logit_T1: Tensor) -> Tensor:
    """logit_T1 -> gate_T = sigmoid(logit)."""
    return sigmoid(logit_T1[:, 0])


def sigmoid_gate_dgrad(dgate_T: Tensor, gate_T: Tensor) -> Tensor:
    """dgate_T, gate_T -> dlogit_T1."""
    return (dgate_T * gate_T * (1 - gate_T))[:, None]


OPS = (
    *(replay_choices, table_choices, weigh_chosen, weigh_chosen_scores),
    *(route, route_dgrad, route_scores, route_scores_dgrad),
    *(sqrt_softplus, sqrt_softplus_dgrad, sigmoid_gate, sigmoid_gate_dgrad),
)
