"""Choices of experts whose width is split over ranks, as choices of their slices. T tokens, K choices, E experts.

A slice gets the rows of its expert, with their gate weight: what the slices of an expert give sums to what it gives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slice_choices(
    gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor, slices: int, apart: int
) -> tuple[Tensor, Tensor]:
    """gate_TK, expert_TK, slots_E -> gate and place (int64) of every slice, [T, K·slices], those of a choice adjacent.

    Slice j of expert e is in place slots[e] + j·apart of the layer.
    """
    places_TK = slots_E.index_select(0, expert_TK.flatten()).view_as(expert_TK)
    steps_J = torch.arange(slices, device=slots_E.device) * apart
    return gate_TK.repeat_interleave(slices, dim=1), (places_TK[:, :, None] + steps_J).flatten(1)


def slice_choices_dgrad(dslice_gate_TL: Tensor, slices: int) -> Tensor:
    """dslice_gate [T, K·slices] -> dgate_TK, summed over the slices of a choice."""
    return dslice_gate_TL.unflatten(1, (-1, slices)).sum(2)


OPS = (slice_choices, slice_choices_dgrad)
