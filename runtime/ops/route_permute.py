"""The router and what follows it in one op: `route`, then `permute` of the rows by what it chose.

T tokens, E experts, K choices, S = T·K rows, D columns.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.permute import permute, permute_placed
from runtime.ops.route import route


def route_permute(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    x_TD: Tensor,
    slots_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits_TE, bias_E or None, x_TD, slots_E or None -> gate_TK, expert_TK, rows_SD, gate_S, order_S, counts_E.

    The first two as of `route`; the others as of `permute`, or with `slots_E` of `permute_placed`.
    """
    gate_TK, expert_TK = route(logits_TE, bias_E, softmax, groups, top_groups, top_k, normalize, scale)
    if slots_E is None:
        return gate_TK, expert_TK, *permute(x_TD, gate_TK, expert_TK, logits_TE.shape[1])
    return gate_TK, expert_TK, *permute_placed(x_TD, gate_TK, expert_TK, slots_E)


OPS = (route_permute,)
