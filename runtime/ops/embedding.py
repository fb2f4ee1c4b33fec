"""Embedding lookup. T tokens, V rows of the table, D columns.

A token below 0 belongs to another tensor rank's part of the table: its row is zeros.
"""

from __future__ import annotations

from torch import Tensor

from runtime.ops.native import ops as native
from runtime.ops.native.library import runs_natively
from runtime.ops.product import wide, wide_dtype


def embedding(tokens_T: Tensor, w_VD: Tensor) -> Tensor:
    """tokens_T (int64), w_VD -> h_TD."""
    if runs_natively(w_VD):
        return native.embedding(tokens_T, w_VD)
    h_TD = w_VD.index_select(0, tokens_T.clamp(min=0))
    return h_TD.masked_fill_((tokens_T < 0)[:, None], 0)


def embedding_wgrad(dy_TD: Tensor, tokens_T: Tensor, vocab: int) -> Tensor:
    """dy_TD, tokens_T, vocab -> dw_VD."""
    dw_VD = dy_TD.new_zeros((vocab, dy_TD.shape[1]), dtype=wide_dtype(dy_TD.dtype))
    embedding_wgrad_(dw_VD, dy_TD, tokens_T)
    return dw_VD.to(dy_TD.dtype)


def embedding_wgrad_(acc_VD: Tensor, dy_TD: Tensor, tokens_T: Tensor) -> None:
    """acc_VD += dw_VD of (dy_TD, tokens_T). Deterministic: on the CPU rows are added in the order of the tokens."""
    if runs_natively(dy_TD):
        return native.embedding_wgrad_(acc_VD, dy_TD, tokens_T)
    acc_VD.index_add_(0, tokens_T.clamp(min=0), wide(dy_TD).masked_fill((tokens_T < 0)[:, None], 0))


OPS = (embedding, embedding_wgrad, embedding_wgrad_)
