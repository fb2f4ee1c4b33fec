"""Shape rules for tracing: what every op returns, without its values. Numbers of rows may be symbolic.

All results are contiguous; each rule takes its op's arguments in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runtime.ops.wide import wide_dtype


def _like(*indices: int) -> Callable[..., Any]:
    """Results shaped like the arguments at `indices`: one tensor, or a tuple of several."""

    def rule(*args: Any) -> Tensor | tuple[Tensor, ...]:
        results = tuple(args[index].new_empty(args[index].shape) for index in indices)
        return results if len(results) > 1 else results[0]

    return rule


def _nothing(*args: Any) -> None:
    """The fake rule of ops that add to their first argument, and return nothing."""


def _statistics(x: Tensor, *shape: Any) -> Tensor:
    return x.new_empty(shape, dtype=wide_dtype(x.dtype))


def _rmsnorm(x_TD: Tensor, w_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), _statistics(x_TD, x_TD.shape[0])


def _rmsnorm_wgrad(dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor) -> Tensor:
    return dy_TD.new_empty(dy_TD.shape[1])


def _head_rmsnorm(x_TW: Tensor, w_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_TW.new_empty(x_TW.shape), _statistics(x_TW, x_TW.shape[0], x_TW.shape[1] // w_C.shape[0])


def _head_rmsnorm_wgrad(dy_TW: Tensor, x_TW: Tensor, rstd_TH: Tensor) -> Tensor:
    return dy_TW.new_empty(dy_TW.shape[1] // rstd_TH.shape[1])


def _gqa_attention(
    q: Tensor, k: Tensor, v: Tensor, sequence: int, heads: int, kv_heads: int, theta: float
) -> tuple[Tensor, Tensor]:
    T = q.shape[0]
    return q.new_empty(q.shape), _statistics(q, T // sequence, kv_heads, sequence, heads // kv_heads)


def _mla_attention(
    q: Tensor, kv: Tensor, k_rope: Tensor, sequence: int, heads: int, nope: int, rope: int, value: int, theta: float
) -> tuple[Tensor, Tensor]:
    T = q.shape[0]
    return q.new_empty((T, heads * value)), _statistics(q, T // sequence, heads, sequence)


def _route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    softmax: bool,
    groups: int,
    top_groups: int,
    top_k: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    chosen = (logits_TE.shape[0], top_k)
    return logits_TE.new_empty(chosen), logits_TE.new_empty(chosen, dtype=torch.int64)


def _permute(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S = expert_TK.shape[0] * expert_TK.shape[1]
    order_S, counts_E = expert_TK.new_empty(S), expert_TK.new_empty(num_experts)
    return x_TD.new_empty((S, x_TD.shape[1])), gate_TK.new_empty(S), order_S, counts_E


def _permute_placed(
    x_TD: Tensor, gate_TK: Tensor, expert_TK: Tensor, slots_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _permute(x_TD, gate_TK, expert_TK, slots_E.shape[0])


def _permute_gate_dgrad(dgate_S: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    return dgate_S.new_empty((dgate_S.shape[0] // top_k, top_k))


def _unpermute(y_SD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    return y_SD.new_empty((y_SD.shape[0] // top_k, y_SD.shape[1]))


def _unpermute_dgrad(dy_TD: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    return dy_TD.new_empty((order_S.shape[0], dy_TD.shape[1]))


def _swiglu(h_TM: Tensor, gate_T: Tensor | None = None) -> Tensor:
    return h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))


def _grouped_linear_wgrad(dy_RN: Tensor, x_RK: Tensor, offsets_G: Tensor, num_experts: int) -> Tensor:
    return x_RK.new_empty((num_experts, dy_RN.shape[1], x_RK.shape[1]))


def _cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    return _statistics(logits_TV), _statistics(logits_TV, *targets_T.shape)


FAKES: dict[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "cross_entropy_dgrad": _like(1),
    "embedding": lambda tokens_T, w_VD: w_VD.new_empty((tokens_T.shape[0], w_VD.shape[1])),
    "embedding_wgrad": lambda dh_TD, tokens_T, vocab: dh_TD.new_empty((vocab, dh_TD.shape[1])),
    "embedding_wgrad_": _nothing,
    "gated_swiglu": _swiglu,
    "gated_swiglu_dgrad": _like(1, 2),
    "gqa_attention": _gqa_attention,
    "gqa_attention_dgrad": _like(1, 2, 3),
    "grouped_linear": lambda x_RK, w_ENK, offsets_G: x_RK.new_empty((x_RK.shape[0], w_ENK.shape[1])),
    "grouped_linear_dgrad": lambda dy_RN, w_ENK, offsets_G: dy_RN.new_empty((dy_RN.shape[0], w_ENK.shape[2])),
    "grouped_linear_wgrad": _grouped_linear_wgrad,
    "grouped_linear_wgrad_": _nothing,
    "head_rmsnorm": _head_rmsnorm,
    "head_rmsnorm_dgrad": _like(1),
    "head_rmsnorm_wgrad": _head_rmsnorm_wgrad,
    "head_rmsnorm_wgrad_": _nothing,
    "linear": lambda x_TK, w_NK: x_TK.new_empty((x_TK.shape[0], w_NK.shape[0])),
    "linear_dgrad": lambda dy_TN, w_NK: dy_TN.new_empty((dy_TN.shape[0], w_NK.shape[1])),
    "linear_wgrad": lambda dy_TN, x_TK: dy_TN.new_empty((dy_TN.shape[1], x_TK.shape[1])),
    "linear_wgrad_": _nothing,
    "linear_wide": lambda x_TK, w_NK: _statistics(x_TK, x_TK.shape[0], w_NK.shape[0]),
    "linear_wide_dgrad": lambda dy_TN, w_NK: w_NK.new_empty((dy_TN.shape[0], w_NK.shape[1])),
    "linear_wide_wgrad": lambda dy_TN, x_TK: x_TK.new_empty((dy_TN.shape[1], x_TK.shape[1])),
    "linear_wide_wgrad_": _nothing,
    "mla_attention": _mla_attention,
    "mla_attention_dgrad": _like(1, 2, 3),
    "permute": _permute,
    "permute_dgrad": _unpermute,
    "permute_gate_dgrad": _permute_gate_dgrad,
    "permute_placed": _permute_placed,
    "rmsnorm": _rmsnorm,
    "rmsnorm_dgrad": _like(1),
    "rmsnorm_wgrad": _rmsnorm_wgrad,
    "rmsnorm_wgrad_": _nothing,
    "route": _route,
    "route_dgrad": _like(1),
    "sequence_balance": lambda logits_TE, expert_TK, sequence, softmax: logits_TE.new_empty(()),
    "sequence_balance_dgrad": _like(1),
    "swiglu": _swiglu,
    "swiglu_dgrad": _like(1),
    "unpermute": _unpermute,
    "unpermute_dgrad": _unpermute_dgrad,
}
