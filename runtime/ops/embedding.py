"""Rows of a table by token. T tokens, V rows of the table, D columns."""

from __future__ import annotations

from torch import Tensor

from runtime.ops.wide import wide, wide_dtype


def embedding(tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    """tokens_T (int64), w_VD -> h_TD."""
    return w_VD.index_select(0, tokens_T)


def embedding_wgrad(dh_TD: Tensor, tokens_T: Tensor, vocab: int) -> Tensor:
    """dh_TD, tokens_T, vocab -> dw_VD."""
    dw_VD = dh_TD.new_zeros((vocab, dh_TD.shape[1]), dtype=wide_dtype(dh_TD.dtype))
    embedding_wgrad_(dw_VD, dh_TD, tokens_T)
    return dw_VD.to(dh_TD.dtype)


def embedding_wgrad_(acc_VD: Tensor, dh_TD: Tensor, tokens_T: Tensor) -> None:
    """acc_VD += dw_VD of (dh_TD, tokens_T). On the CPU `index_add_` adds in the order of the tokens: deterministic."""
    acc_VD.index_add_(0, tokens_T, wide(dh_TD))
