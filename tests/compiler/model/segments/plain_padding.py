"""What routers count without padding, in plain torch. Where padding goes is a choice of the op, without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.padding import spread_padding as spread_padding


def blank_rows(x_TN: Tensor, real_T: Tensor) -> Tensor:
    return x_TN * (real_T > 0)[:, None]


def real_counts(expert_TK: Tensor, real_T: Tensor, slots_E: Tensor | None, num_places: int, rows: int) -> Tensor:
    place_TK = expert_TK if slots_E is None else slots_E[expert_TK]
    one_hot_TKE = torch.nn.functional.one_hot(place_TK, num_places) * (real_T > 0)[:, None, None]
    return one_hot_TKE.sum(1).view(-1, rows, num_places).sum(1)


def real_balance(logits_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int, softmax: bool) -> Tensor:
    score_TE = torch.softmax(logits_TE, dim=1) if softmax else torch.sigmoid(logits_TE)
    return real_balance_scores(score_TE, counts_NE, real_T, rows, top_k)


def real_balance_scores(score_TE: Tensor, counts_NE: Tensor, real_T: Tensor, rows: int, top_k: int) -> Tensor:
    """Token by token, with the counts of all ranks."""
    B, E = len(score_TE) // rows, score_TE.shape[1]
    counts_BE = counts_NE.view(-1, B, E).sum(0).to(score_TE.dtype)
    tokens_B1 = counts_BE.sum(1, keepdim=True) / top_k
    frequency_BE = E * counts_BE / (top_k * tokens_B1)
    share_TE = score_TE / score_TE.sum(1, keepdim=True)
    real = [t for t in range(len(score_TE)) if real_T[t]]
    return sum(
        ((share_TE[t] * frequency_BE[t // rows]).sum() / tokens_B1[t // rows, 0] for t in real), score_TE.new_zeros(())
    )
