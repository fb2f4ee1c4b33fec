"""The balance loss of each sequence, Σ_i f_i·P_i, summed over the sequences.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 17 to 20; with softmax scores the loss of "DeepSeek-V2",
2024, equations 23 to 25. Without α, which arrives with the tangent. T tokens in B sequences of S, E experts, K choices.

Ranks that have parts of sequences, n rows of each, count choices first (`choice_counts`) and put the counts together.
What a rank then has of the loss (`counted_balance`) is Σ_i f_i·P_i with the f_i of whole sequences, and of P_i what its
rows add to the mean; the sum over the ranks is the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.routing import scores


def sequence_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """logits_TE, expert_TK (int64) -> loss [].

    f_i = E/(K·S) · choices of expert i in the sequence, a constant; P_i = mean over the sequence of s_i / Σ_e s_e, with
    s the router's scores: softmax over all experts (whose sum is 1) or sigmoid.
    """
    share_BSE, _ = _shares(logits_TE, sequence, softmax)
    return _weighted(share_BSE, _frequency(expert_TK, logits_TE, sequence), sequence)


def sequence_balance_dgrad(dloss: Tensor, logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """dloss [], logits_TE, expert_TK -> dlogits_TE."""
    frequency_BE = _frequency(expert_TK, logits_TE, sequence)
    return _of_logits(dloss, *_shares(logits_TE, sequence, softmax), frequency_BE, sequence, softmax)


def balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """score_TE, expert_TK (int64) -> loss []: `sequence_balance` of scores that are given."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    share_BSE = score_BSE / score_BSE.sum(dim=-1, keepdim=True)
    return _weighted(share_BSE, _frequency(expert_TK, score_TE, sequence), sequence)


def balance_scores_dgrad(dloss: Tensor, score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """dloss [], score_TE, expert_TK -> dscore_TE."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    return _of_scores(dloss, score_BSE, _frequency(expert_TK, score_TE, sequence), sequence)


def _frequency(expert_TK: Tensor, logits_TE: Tensor, sequence: int) -> Tensor:
    """expert_TK -> f_BE, in the dtype of the logits; 1 for every expert if the sequence is balanced."""
    K, E = expert_TK.shape[1], logits_TE.shape[1]
    return choice_counts(expert_TK, E, sequence).to(logits_TE.dtype) * (E / (K * sequence))


# ---------------------------------------------------------------- with counts of whole sequences


def choice_counts(expert_TK: Tensor, num_experts: int, rows: int) -> Tensor:
    """expert_TK (int64) -> [T / rows, E] (int64): how many of each so many tokens choose each expert."""
    T, E = expert_TK.shape[0], num_experts
    first_T = torch.arange(T, device=expert_TK.device) // rows * E
    return torch.bincount((expert_TK + first_T[:, None]).flatten(), minlength=T // rows * E).view(-1, E)


def counted_balance(logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool) -> Tensor:
    """logits_TE of `rows` rows of each sequence, choices of each sequence on one rank after the other -> loss []."""
    share_BnE, _ = _shares(logits_TE, rows, softmax)
    return _weighted(share_BnE, _counted(counts_NE, share_BnE), sequence)


def counted_balance_dgrad(
    dloss: Tensor, logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool
) -> Tensor:
    """dloss [], logits_TE, counts_NE -> dlogits_TE."""
    share_BnE, score_BnE = _shares(logits_TE, rows, softmax)
    return _of_logits(dloss, share_BnE, score_BnE, _counted(counts_NE, share_BnE), sequence, softmax)


def counted_balance_scores(score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int) -> Tensor:
    """`counted_balance` of scores that are given."""
    score_BnE = score_TE.unflatten(0, (-1, rows))
    share_BnE = score_BnE / score_BnE.sum(dim=-1, keepdim=True)
    return _weighted(share_BnE, _counted(counts_NE, share_BnE), sequence)


def counted_balance_scores_dgrad(
    dloss: Tensor, score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int
) -> Tensor:
    """dloss [], score_TE, counts_NE -> dscore_TE."""
    score_BnE = score_TE.unflatten(0, (-1, rows))
    return _of_scores(dloss, score_BnE, _counted(counts_NE, score_BnE), sequence)


def _counted(counts_NE: Tensor, like_BnE: Tensor) -> Tensor:
    """Choices on each rank -> f_BE, in the dtype of the shares."""
    counts_BE = counts_NE.unflatten(0, (-1, len(like_BnE))).sum(dim=0).to(like_BnE.dtype)
    return counts_BE * (counts_BE.shape[1] / counts_BE.sum(dim=1, keepdim=True))


# ---------------------------------------------------------------- of n rows of each sequence


def _shares(logits_TE: Tensor, rows: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """logits_TE -> share_BnE = s / Σ_e s_e, score_BnE = s."""
    score_BnE = scores(logits_TE, softmax).unflatten(0, (-1, rows))
    return score_BnE if softmax else score_BnE / score_BnE.sum(dim=-1, keepdim=True), score_BnE


def _weighted(share_BnE: Tensor, frequency_BE: Tensor, sequence: int) -> Tensor:
    """Σ_i f_i·P_i, with what these rows add to P_i."""
    rows, mean_BE = share_BnE.shape[1], share_BnE.mean(dim=1)
    return ((mean_BE if rows == sequence else mean_BE * (rows / sequence)) * frequency_BE).sum()


def _of_logits(
    dloss: Tensor, share_BnE: Tensor, score_BnE: Tensor, frequency_BE: Tensor, sequence: int, softmax: bool
) -> Tensor:
    """dlogits_TE."""
    dshare_B1E = (frequency_BE * (dloss / sequence))[:, None]
    mean_Bn1 = (share_BnE * dshare_B1E).sum(dim=-1, keepdim=True)
    dlogits_BnE = (dshare_B1E - mean_Bn1).mul_(share_BnE)
    if not softmax:  # ds_i = (dp_i − Σ dp·p) / Σs, times s_i·(1 − s_i); s_i / Σs is the share
        dlogits_BnE.mul_(1 - score_BnE)
    return dlogits_BnE.flatten(0, 1)


def _of_scores(dloss: Tensor, score_BnE: Tensor, frequency_BE: Tensor, sequence: int) -> Tensor:
    """dscore_TE."""
    total_Bn1 = score_BnE.sum(dim=-1, keepdim=True)
    dshare_B1E = (frequency_BE * (dloss / sequence))[:, None]
    mean_Bn1 = (score_BnE * dshare_B1E).sum(dim=-1, keepdim=True) / total_Bn1
    return ((dshare_B1E - mean_Bn1) / total_Bn1).flatten(0, 1)


OPS = (
    sequence_balance,
    sequence_balance_dgrad,
    balance_scores,
    balance_scores_dgrad,
    choice_counts,
    counted_balance,
    counted_balance_dgrad,
    counted_balance_scores,
    counted_balance_scores_dgrad,
)
