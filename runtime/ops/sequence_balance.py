"""The balance loss of each sequence, Σ_i f_i·P_i, summed over the sequences.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, equations 17 to 20; with softmax scores the loss of "DeepSeek-V2",
2024, equations 23 to 25. The factor α is not included; it is part of dloss. T tokens in B sequences of S, E experts, K
choices.

If ranks have parts of sequences, n rows of each, they first count choices (`choice_counts`) and all-gather the counts.
A rank's share of the loss (`counted_balance`) is Σ_i f_i·P_i with the f_i of whole sequences, and only its own rows'
contribution to the mean P_i. The loss is the sum over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.routing import scores


def sequence_balance(logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """logits_TE, expert_TK (int64) -> loss [].

    f_i = E/(K·S) · choices of expert i in the sequence, treated as a constant; P_i = mean over the sequence of
    s_i / Σ_e s_e, with s the router's scores: softmax over all experts (whose sum is 1) or sigmoid.
    """
    share_BSE, _ = _shares(logits_TE, sequence, softmax)
    return _balance_loss(share_BSE, _frequency(expert_TK, logits_TE, sequence), sequence)


def sequence_balance_dgrad(dloss: Tensor, logits_TE: Tensor, expert_TK: Tensor, sequence: int, softmax: bool) -> Tensor:
    """dloss [], logits_TE, expert_TK -> dlogits_TE."""
    frequency_BE = _frequency(expert_TK, logits_TE, sequence)
    return _of_logits(dloss, *_shares(logits_TE, sequence, softmax), frequency_BE, sequence, softmax)


def balance_scores(score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """score_TE, expert_TK (int64) -> loss []: `sequence_balance` with scores instead of logits."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    share_BSE = score_BSE / score_BSE.sum(dim=-1, keepdim=True)
    return _balance_loss(share_BSE, _frequency(expert_TK, score_TE, sequence), sequence)


def balance_scores_dgrad(dloss: Tensor, score_TE: Tensor, expert_TK: Tensor, sequence: int) -> Tensor:
    """dloss [], score_TE, expert_TK -> dscore_TE."""
    score_BSE = score_TE.unflatten(0, (-1, sequence))
    return _of_scores(dloss, score_BSE, _frequency(expert_TK, score_TE, sequence), sequence)


def _frequency(expert_TK: Tensor, logits_TE: Tensor, sequence: int) -> Tensor:
    """expert_TK -> f_BE, in the dtype of the logits; all 1 if the sequence is balanced."""
    K, E = expert_TK.shape[1], logits_TE.shape[1]
    return choice_counts(expert_TK, E, sequence).to(logits_TE.dtype) * (E / (K * sequence))


# ---------------------------------------------------------------- with counts of whole sequences


def choice_counts(expert_TK: Tensor, num_experts: int, rows: int) -> Tensor:
    """expert_TK (int64) -> [T / rows, E] (int64): for each block of `rows` tokens, how many choose each expert."""
    T, E = expert_TK.shape[0], num_experts
    first_T = torch.arange(T, device=expert_TK.device) // rows * E
    choices, num_counts = (expert_TK + first_T[:, None]).flatten(), T // rows * E
    if choices.is_cpu:
        return torch.bincount(choices, minlength=num_counts).view(-1, E)
    counts = choices.new_zeros(num_counts)  # bincount would make the host wait for the device
    return counts.scatter_add_(0, choices, torch.ones_like(choices)).view(-1, E)


def counted_balance(logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool) -> Tensor:
    """logits_TE of `rows` rows of each sequence, counts_NE: choices of each sequence, rank by rank -> loss []."""
    share_BnE, _ = _shares(logits_TE, rows, softmax)
    return _balance_loss(share_BnE, _frequency_of_counts(counts_NE, share_BnE), sequence)


def counted_balance_dgrad(
    dloss: Tensor, logits_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int, softmax: bool
) -> Tensor:
    """dloss [], logits_TE, counts_NE -> dlogits_TE."""
    share_BnE, score_BnE = _shares(logits_TE, rows, softmax)
    return _of_logits(dloss, share_BnE, score_BnE, _frequency_of_counts(counts_NE, share_BnE), sequence, softmax)


def counted_balance_scores(score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int) -> Tensor:
    """`counted_balance` with scores instead of logits."""
    score_BnE = score_TE.unflatten(0, (-1, rows))
    share_BnE = score_BnE / score_BnE.sum(dim=-1, keepdim=True)
    return _balance_loss(share_BnE, _frequency_of_counts(counts_NE, share_BnE), sequence)


def counted_balance_scores_dgrad(
    dloss: Tensor, score_TE: Tensor, counts_NE: Tensor, rows: int, sequence: int
) -> Tensor:
    """dloss [], score_TE, counts_NE -> dscore_TE."""
    score_BnE = score_TE.unflatten(0, (-1, rows))
    return _of_scores(dloss, score_BnE, _frequency_of_counts(counts_NE, score_BnE), sequence)


def _frequency_of_counts(counts_NE: Tensor, like_BnE: Tensor) -> Tensor:
    """counts_NE of all ranks -> f_BE, in the dtype of the shares."""
    counts_BE = counts_NE.unflatten(0, (-1, len(like_BnE))).sum(dim=0).to(like_BnE.dtype)
    return counts_BE * (counts_BE.shape[1] / counts_BE.sum(dim=1, keepdim=True))


# ---------------------------------------------------------------- on n rows of each sequence


def _shares(logits_TE: Tensor, rows: int, softmax: bool) -> tuple[Tensor, Tensor]:
    """logits_TE -> share_BnE = s / Σ_e s_e, score_BnE = s."""
    score_BnE = scores(logits_TE, softmax).unflatten(0, (-1, rows))
    return score_BnE if softmax else score_BnE / score_BnE.sum(dim=-1, keepdim=True), score_BnE


def _balance_loss(share_BnE: Tensor, frequency_BE: Tensor, sequence: int) -> Tensor:
    """Return Σ_i f_i·P_i, with these rows' contribution to P_i."""
    rows, mean_BE = share_BnE.shape[1], share_BnE.mean(dim=1)
    return ((mean_BE if rows == sequence else mean_BE * (rows / sequence)) * frequency_BE).sum()


def _of_logits(
    dloss: Tensor, share_BnE: Tensor, score_BnE: Tensor, frequency_BE: Tensor, sequence: int, softmax: bool
) -> Tensor:
    """Return dlogits_TE."""
    dshare_B1E = (frequency_BE * (dloss / sequence))[:, None]
    mean_Bn1 = (share_BnE * dshare_B1E).sum(dim=-1, keepdim=True)
    dlogits_BnE = (dshare_B1E - mean_Bn1).mul_(share_BnE)
    if not softmax:  # ds_i = (dp_i − Σ dp·p) / Σs, times s_i·(1 − s_i); s_i / Σs is the share
        dlogits_BnE.mul_(1 - score_BnE)
    return dlogits_BnE.flatten(0, 1)


def _of_scores(dloss: Tensor, score_BnE: Tensor, frequency_BE: Tensor, sequence: int) -> Tensor:
    """Return dscore_TE."""
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
