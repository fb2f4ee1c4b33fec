"""Residual streams of hyper-connections in plain torch, for autograd: a part of the table in plain.py."""

from __future__ import annotations

import torch
from torch import Tensor


def hyper_products(h_TN: Tensor, fn_MN: Tensor, eps: float) -> Tensor:
    return h_TN / torch.sqrt((h_TN**2).mean(dim=1, keepdim=True) + eps) @ fn_MN.T


def scale_parts(x_TM: Tensor, scale_S: Tensor) -> Tensor:
    n = round((x_TM.shape[1] + 1) ** 0.5) - 1
    columns = torch.tensor([n, n, n * n] if len(scale_S) == 3 else [x_TM.shape[1]])
    return x_TM * scale_S.repeat_interleave(columns)


def hyper_mix(h_TN: Tensor, logits_TM: Tensor, rounds: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n = round((logits_TM.shape[1] + 1) ** 0.5) - 1
    comb_Tnn = logits_TM[:, 2 * n :].unflatten(1, (n, n)).softmax(dim=2) + eps
    comb_Tnn = comb_Tnn / (comb_Tnn.sum(dim=1, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb_Tnn = comb_Tnn / (comb_Tnn.sum(dim=2, keepdim=True) + eps)
        comb_Tnn = comb_Tnn / (comb_Tnn.sum(dim=1, keepdim=True) + eps)
    x_TD = hyper_collapse(h_TN, logits_TM[:, :n], eps)
    return x_TD, 2 * torch.sigmoid(logits_TM[:, n : 2 * n]), comb_Tnn.flatten(1)


def hyper_collapse(h_TN: Tensor, logits_Tn: Tensor, eps: float) -> Tensor:
    h_TnD = h_TN.unflatten(1, (logits_Tn.shape[1], -1))
    return ((torch.sigmoid(logits_Tn) + eps)[:, :, None] * h_TnD).sum(dim=1)


def hyper_add(h_TN: Tensor, y_TD: Tensor, post_Tn: Tensor, comb_TC: Tensor) -> Tensor:
    n = post_Tn.shape[1]
    h_TnD, comb_Tnn = h_TN.unflatten(1, (n, -1)), comb_TC.unflatten(1, (n, n))
    streams = [
        post_Tn[:, k, None] * y_TD + sum(comb_Tnn[:, i, k, None] * h_TnD[:, i] for i in range(n)) for k in range(n)
    ]
    return torch.cat(streams, dim=1)


def hyper_copy(x_TD: Tensor, streams: int) -> Tensor:
    return torch.cat([x_TD] * streams, dim=1)
