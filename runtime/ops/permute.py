"""A row for each choice of each token, sorted stably by expert.

T tokens, K choices, S = T·K rows, E experts, D columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.unpermute import places, unpermute


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
    """The same where expert e is in place slots[e] of the layer (int64, a permutation), instead of place e: rows are
    in the order of the places, and counts are those of each place.
    """
    return _sorted(x_TD, gate_TK, slots_E.index_select(0, expert_TK.flatten()), slots_E.shape[0])


def _sorted(x_TD: Tensor, gate_TK: Tensor, place_S: Tensor, num_places: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order_S = torch.argsort(place_S, stable=True)
    rows_SD = x_TD.index_select(0, order_S // gate_TK.shape[1])
    gate_S = gate_TK.flatten().index_select(0, order_S)
    return rows_SD, gate_S, order_S, torch.bincount(place_S, minlength=num_places)


def permute_dgrad(drows_SD: Tensor, dgate_S: Tensor, order_S: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """drows_SD, dgate_S, order_S -> dx_TD (summed over the choices of a token), dgate_TK."""
    return unpermute(drows_SD, order_S, top_k), dgate_S[places(order_S, top_k)]
