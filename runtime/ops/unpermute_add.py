"""The join of a layer in one op: the residual, the shared experts, and the routed experts' rows summed by token.

S = T·K rows, T tokens, K choices, D columns.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.unpermute import unpermute


def unpermute_add(h_TD: Tensor, shared_TD: Tensor | None, y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """h_TD, shared_TD or None, y_SD, order_S -> (h + shared) + unpermute(y), each of the three results rounded."""
    sum_TD = h_TD if shared_TD is None else h_TD + shared_TD
    return sum_TD + unpermute(y_SD, order_S, top_k)


OPS = (unpermute_add,)
