"""Padding rows in a router: they are spread over the experts, and excluded from expert loads and balance losses.

T tokens, E experts in groups of M, K choices. `real` int32 [T] is 1 for a token of the data, 0 for padding after the
last one. Shapes are fixed, so padding takes rows like tokens do. Its choices are spread because the router would send
all of it to the same few experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.routing import scores


def spread_padding(expert_TK: Tensor, real_T: Tensor, num_experts: int, groups: int) -> Tensor:
    """expert_TK (int64), real_T -> expert_TK with the choices of padding rows replaced: K adjacent experts, advancing
    from row to row. They span as few of the `groups` as K experts can, so limits on groups hold.
    """
    top_k, group = expert_TK.shape[1], num_experts // groups
    number_T = (real_T == 0).cumsum(0) - 1  # index of a padding row among the padding rows
    if top_k <= group:
        within_T = number_T // groups % (group // top_k)
        first_T = number_T % groups * group + within_T * top_k
    else:
        first_T = number_T % (groups - -(-top_k // group) + 1) * group
    spread_TK = first_T[:, None] + torch.arange(top_k, device=expert_TK.device)
    return torch.where(real_T[:, None] != 0, expert_TK, spread_TK)


def blank_rows(x_TN: Tensor, real_T: Tensor) -> Tensor:
    """x_TN, real_T -> y_TN: x with the padding rows set to zero."""
    return torch.where(real_T[:, None] != 0, x_TN, torch.zeros((), dtype=x_TN.dtype, device=x_TN.device))


def blank_rows_dgrad(dy_TN: Tensor, real_T: Tensor) -> Tensor:
    """dy_TN, real_T -> dx_TN, zero in padding rows."""
    return blank_rows(dy_TN, real_T)


def real_counts(expert_TK: Tensor, real_T: Tensor, slots_E: Tensor | None, num_places: int, rows: int) -> Tensor:
    """expert_TK (int64), real_T, slots_E or None -> [T / rows, num_places] (int64): for each block of `rows` rows, how
    many tokens choose each expert, without padding. With slots, expert e is counted in place slots[e].
    """
    place_TK = expert_TK if slots_E is None else slots_E.index_select(0, expert_TK.flatten()).view_as(expert_TK)
    part_T1 = (torch.arange(len(expert_TK), device=expert_TK.device) // rows * num_places)[:, None]
    counts = torch.zeros(len(expert_TK) // rows * num_places, dtype=torch.int64, device=expert_TK.device)
    ones_TK = (real_T != 0).to(torch.int64)[:, None].expand_as(place_TK)
    return counts.scatter_add_(0, (part_T1 + place_TK).flatten(), ones_TK.flatten()).view(-1, num_places)


def real_balance(logits_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, softmax: bool) -> Tensor:
    """logits_TE of `rows` rows of each sequence, real_T, and counts_NE, the `real_counts` of each sequence, rank by
    rank -> loss []: `sequence_balance` over the n real tokens of each sequence, Σ_i f_i·P_i with f_i = E/(K·n) ·
    choices of expert i and P_i the mean over the tokens. The loss is this rank's share: the contribution of its rows.
    """
    return real_balance_scores(scores(logits_TE, softmax), counts_NE, real_T, rows, top_k)


def real_balance_dgrad(
    dloss: Tensor, logits_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, softmax: bool
) -> Tensor:
    """dloss [], logits_TE, counts_NE, real_T -> dlogits_TE, 0 in padding rows."""
    score_TE = scores(logits_TE, softmax)
    dscore_TE = real_balance_scores_dgrad(dloss, score_TE, counts_NE, real_T, rows, top_k)
    if not softmax:
        return dscore_TE.mul_(score_TE).mul_(1 - score_TE)
    return (dscore_TE - (dscore_TE * score_TE).sum(dim=-1, keepdim=True)).mul_(score_TE)


def real_balance_scores(score_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int) -> Tensor:
    """`real_balance` for scores instead of logits."""
    share_BnE = (score_TE / score_TE.sum(dim=-1, keepdim=True)).unflatten(0, (-1, rows))
    weight_BnE = _weights(counts_NE, real_T, rows, top_k, score_TE)
    return (share_BnE * weight_BnE).sum(dim=1).sum()


def real_balance_scores_dgrad(
    dloss: Tensor, score_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int
) -> Tensor:
    """dloss [], score_TE, counts_NE, real_T -> dscore_TE, 0 in padding rows."""
    total_T1 = score_TE.sum(dim=-1, keepdim=True)
    dshare_TE = _weights(counts_NE, real_T, rows, top_k, score_TE).flatten(0, 1) * dloss
    mean_T1 = (score_TE * dshare_TE).sum(dim=-1, keepdim=True) / total_T1
    return (dshare_TE - mean_T1) / total_T1


def _weights(counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, like_TE: Tensor) -> Tensor:
    """Return f_i / n for each token of a sequence and 0 for padding, [B, rows, E]; all 0 for a sequence without
    tokens."""
    real_Bn1 = real_T.view(-1, rows, 1).to(like_TE.dtype)
    counts_BE = counts_NE.unflatten(0, (-1, len(real_Bn1))).sum(dim=0).to(like_TE.dtype)
    choices_B1 = counts_BE.sum(dim=1, keepdim=True).clamp_(min=1)
    return real_Bn1 * (counts_BE * (counts_BE.shape[1] * top_k) / choices_B1.square())[:, None]


OPS = (
    *(blank_rows, blank_rows_dgrad, spread_padding, real_counts),
    *(real_balance, real_balance_dgrad, real_balance_scores, real_balance_scores_dgrad),
)
