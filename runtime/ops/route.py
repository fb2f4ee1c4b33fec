"""Choosing experts, DeepSeek-V3's way: sigmoid scores, groups of experts, a bias that steers the choice alone.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2. T tokens, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-20  # V3 adds it to the sum of the chosen scores


def route(
    logits_TE: Tensor, bias_E: Tensor, groups: int, top_groups: int, top_k: int, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """logits_TE, bias_E -> gate_TK, expert_TK (int64).

    Experts are chosen by sigmoid(logits) + bias among the `top_groups` groups with the largest sums of their two best;
    the gate weight is the score without bias, divided by the sum of the chosen if `normalize`, times `scale`.
    """
    score_TE = torch.sigmoid(logits_TE)
    expert_TK = _among_best_groups(score_TE + bias_E, groups, top_groups).topk(top_k, dim=-1).indices
    gate_TK = score_TE.gather(1, expert_TK)
    if normalize:
        gate_TK = gate_TK / (gate_TK.sum(dim=-1, keepdim=True) + TINY)
    return gate_TK * scale, expert_TK


def _among_best_groups(choice_TE: Tensor, groups: int, top_groups: int) -> Tensor:
    """choice_TE with −inf in all but the `top_groups` best of its `groups`."""
    if top_groups == groups:
        return choice_TE
    choice_TGM = choice_TE.unflatten(1, (groups, -1))
    best_TG = choice_TGM.topk(min(2, choice_TGM.shape[2]), dim=-1).values.sum(dim=-1)
    dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, best_TG.topk(top_groups).indices, False)
    return choice_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)


def route_dgrad(dgate_TK: Tensor, logits_TE: Tensor, expert_TK: Tensor, normalize: bool, scale: float) -> Tensor:
    """dgate_TK, logits_TE, expert_TK -> dlogits_TE. The choice has no gradient."""
    score_TK = torch.sigmoid(logits_TE.gather(1, expert_TK))
    dscore_TK = dgate_TK * scale
    if normalize:
        total_T1 = score_TK.sum(dim=-1, keepdim=True) + TINY
        mean_T1 = (dscore_TK * score_TK).sum(dim=-1, keepdim=True) / total_T1
        dscore_TK = (dscore_TK - mean_T1) / total_T1
    dlogits_TK = dscore_TK * score_TK * (1 - score_TK)
    return torch.zeros_like(logits_TE).scatter_(1, expert_TK, dlogits_TK)  # the K experts of a token are distinct
