"""The balance loss of each sequence, Σ_i f_i·P_i, summed over the sequences.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 17 to 20; with softmax scores the loss of "DeepSeek-V2",
2024, equations 23 to 25. Without α, which arrives with the tangent. T tokens in B sequences of S, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.route import scores


def sequence_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """logits_TE, expert_TK (int64) -> loss [].

    f_i = E/(K·S) · choices of expert i in the sequence, a constant; P_i = mean over the sequence of s_i / Σ_e s_e, with
    s the router's scores: softmax over all experts (whose sum is 1) or sigmoid.
    """
    share_BSE, _ = _shares(logits_TE, sequence, softmax)
    return (share_BSE.mean(dim=1) * _frequency(expert_TK, logits_TE, sequence)).sum()


def sequence_balance_dgrad(dloss: Tensor, logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """dloss [], logits_TE, expert_TK -> dlogits_TE."""
    share_BSE, score_BSE = _shares(logits_TE, sequence, softmax)
    dshare_B1E = (_frequency(expert_TK, logits_TE, sequence) * (dloss / sequence))[:, None]
    mean_BS1 = (share_BSE * dshare_B1E).sum(dim=-1, keepdim=True)
    dlogits_BSE = (dshare_B1E - mean_BS1).mul_(share_BSE)
    if not softmax:  # ds_i = (dp_i − Σ dp·p) / Σs, times s_i·(1 − s_i); s_i / Σs is the share
        dlogits_BSE.mul_(1 - score_BSE)
    return dlogits_BSE.flatten(0, 1)


def _shares(logits_TE: Tensor, sequence: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """logits_TE -> share_BSE = s / Σ_e s_e, score_BSE = s."""
    score_BSE = scores(logits_TE, softmax).unflatten(0, (-1, sequence))
    return score_BSE if softmax else score_BSE / score_BSE.sum(dim=-1, keepdim=True), score_BSE


def _frequency(expert_TK: Tensor, logits_TE: Tensor, sequence: int) -> Tensor:
    """expert_TK -> f_BE, in the dtype of the logits; 1 for every expert if the sequence is balanced."""
    (T, K), E = expert_TK.shape, logits_TE.shape[1]
    first_T = torch.arange(T, device=expert_TK.device) // sequence * E
    counts_BE = torch.bincount((expert_TK + first_T[:, None]).flatten(), minlength=T // sequence * E).view(-1, E)
    return counts_BE.to(logits_TE.dtype) * (E / (K * sequence))


def balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """score_TE, expert_TK (int64) -> loss []: `sequence_balance` of scores that are given."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    share_BSE = score_BSE / score_BSE.sum(dim=-1, keepdim=True)
    return (share_BSE.mean(dim=1) * _frequency(expert_TK, score_TE, sequence)).sum()


def balance_scores_dgrad(dloss: Tensor, score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """dloss [], score_TE, expert_TK -> dscore_TE."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    total_BS1 = score_BSE.sum(dim=-1, keepdim=True)
    dshare_B1E = (_frequency(expert_TK, score_TE, sequence) * (dloss / sequence))[:, None]
    mean_BS1 = (score_BSE * dshare_B1E).sum(dim=-1, keepdim=True) / total_BS1
    return ((dshare_B1E - mean_BS1) / total_BS1).flatten(0, 1)


OPS = (sequence_balance, sequence_balance_dgrad, balance_scores, balance_scores_dgrad)
