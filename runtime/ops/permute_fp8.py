"""Moving rows of eight bits, with their scales. T tokens, K choices, S = T·K rows, E experts, D columns, B tiles.

Each is the op without `fp8` in its name, of the data and of the scales, which go where their rows go. The scales that
are returned lie column by column, as those that come in do (runtime/ops/quantise.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.permute import permute, permute_placed
from runtime.ops.quantise import quantise
from runtime.ops.route import route
from runtime.ops.unpermute import unpermute_dgrad


def permute_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x_TD, scales_TB, gate_TK, expert_TK -> rows_SD, scales_SB, gate_S, order_S, counts_E."""
    rows_SD, *rest = permute(x_TD.view(torch.uint8), gate_TK, expert_TK, num_experts)
    return _with_scales(rows_SD.view(x_TD.dtype), scales_TB, gate_TK.shape[1], *rest)


def permute_placed_fp8(
    x_TD: Tensor, scales_TB: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`permute_fp8` for experts that are placed: expert e is in place slots[e]."""
    rows_SD, *rest = permute_placed(x_TD.view(torch.uint8), gate_TK, expert_TK, slots_E)
    return _with_scales(rows_SD.view(x_TD.dtype), scales_TB, gate_TK.shape[1], *rest)


def route_permute_fp8(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    x_TD: Tensor,
    scales_TB: Tensor,
    slots_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits_TE, …, x_TD, scales_TB, … -> gate_TK, expert_TK, rows_SD, scales_SB, gate_S, order_S, counts_E."""
    gate_TK, expert_TK = route(logits_TE, bias_E, softmax, groups, top_groups, top_k, normalize, scale)
    if slots_E is None:
        return gate_TK, expert_TK, *permute_fp8(x_TD, scales_TB, gate_TK, expert_TK, logits_TE.shape[1])
    return gate_TK, expert_TK, *permute_placed_fp8(x_TD, scales_TB, gate_TK, expert_TK, slots_E)


def unpermute_fp8_dgrad(dy_TD: Tensor, scales_TB: Tensor, order_S: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """dy_TD, scales_TB, order_S -> dy_SD, scales_SB."""
    dy_SD = unpermute_dgrad(dy_TD.view(torch.uint8), order_S, top_k).view(dy_TD.dtype)
    return dy_SD, _scales(scales_TB, order_S, top_k)


def unpermute_dgrad_quantise(dy_TD: Tensor, order_S: Tensor, top_k: int, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """dy_TD, order_S -> dy_SD, scales_SB: every row of a token is its gradient, quantised once."""
    return unpermute_fp8_dgrad(*quantise(dy_TD, pow2), order_S, top_k)


def _with_scales(
    rows_SD: Tensor, scales_TB: Tensor, top_k: int, gate_S: Tensor, order_S: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return rows_SD, _scales(scales_TB, order_S, top_k), gate_S, order_S, counts_E


def _scales(scales_TB: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """scales_TB, order_S -> scales_SB: those of each row's token."""
    return scales_TB.t().index_select(1, order_S // top_k).t()


OPS = (permute_fp8, permute_placed_fp8, route_permute_fp8, unpermute_fp8_dgrad, unpermute_dgrad_quantise)
