"""A row for each choice of each token, sorted stably by expert.

T tokens, K choices, S = T·K rows, E experts, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.unpermute import unpermute


def permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_TD, gate_TK, expert_TK (int64) -> rows_SD, gate_S, order_S (int64), counts_E (int64).

    Row j holds choice order[j] = t·K + k: token t's row and its gate weight; counts are the rows of each expert.
    """
    return _sorted(x_TD, gate_TK, expert_TK.flatten(), num_experts)


def permute_placed(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permute` for experts that are placed: expert e is in place slots[e] of the layer (int64, a permutation). Rows
    are in the order of the places, and counts are those of each place.
    """
    return _sorted(x_TD, gate_TK, slots_E.index_select(0, expert_TK.flatten()), slots_E.shape[0])


def _sorted(x_TD: Tensor, gate_TK: Tensor, place_S: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_S = torch.argsort(place_S, stable=True)
    rows_SD = x_TD.index_select(0, order_S // gate_TK.shape[1])
    gate_S = gate_TK.flatten().index_select(0, order_S)
    return rows_SD, gate_S, order_S, torch.bincount(place_S, minlength=num_places)


def permute_dgrad(drows_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drows_SD, order_S -> dx_TD, summed over the choices of a token."""
    return unpermute(drows_SD, order_S, top_k)


def permute_gate_dgrad(drow_gate_S: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """drow_gate_S, order_S -> dgate_TK: an op of its own, for the router's gradient needs it before anyone needs dx."""
    return torch.empty_like(drow_gate_S).scatter_(0, order_S, drow_gate_S).view(-1, top_k)


def permute_dgrad_add(drows_SD: Tensor, order_S: Tensor, top_k: int, add_TD: Tensor, more_TD: Tensor | None) -> Tensor:
    """drows_SD, order_S, add_TD, more_TD or None -> (add + permute_dgrad(drows)) + more, each result rounded: the rows'
    gradient and the others of what was permuted, in the order in which they are added without this op.
    """
    sum_TD = torch.add(add_TD, permute_dgrad(drows_SD, order_S, top_k))
    return sum_TD if more_TD is None else torch.add(sum_TD, more_TD)


OPS = (permute, permute_placed, permute_dgrad, permute_gate_dgrad, permute_dgrad_add)
