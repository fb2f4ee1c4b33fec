"""Ops on E4M3 numbers in C++: functions of the names, arguments and results of those in `runtime.ops`, where
`library.takes` their operands. Scales may lie by rows or by columns; those that are returned lie as `quantise` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.native.library import call

E4M3 = torch.float8_e4m3fn
TILE = 128


def quantise(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    q_RC, s_RB = _results(x_RC, *x_RC.shape)
    call("quantise", x_RC.dtype, *x_RC.shape, x_RC, pow2, q_RC, s_RB.t())
    return q_RC, s_RB


def quantise_columns(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    q_CR, s_CB = _results(x_RC, *reversed(x_RC.shape))
    call("quantise_columns", x_RC.dtype, *x_RC.shape, x_RC, pow2, q_CR, s_CB.t())
    return q_CR, s_CB


def quantise_blocks(w_NK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor]:
    *experts, N, K = w_NK.shape
    q_NK, q_KN = w_NK.new_empty(w_NK.shape, dtype=E4M3), w_NK.new_empty((*experts, K, N), dtype=E4M3)
    s = w_NK.new_empty((*experts, _tiles(N), _tiles(K)), dtype=torch.float32)
    call("quantise_blocks", w_NK.dtype, *(experts or (1,)), N, K, w_NK, pow2, q_NK, s, q_KN)
    return q_NK, s, q_KN


def requantise(q_RC: Tensor, s_RB: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    (R, C), B = q_RC.shape, s_RB.shape[1]
    assert s_RB.shape == (R, _tiles(C)) and s_RB.dtype == torch.float32, (q_RC.shape, s_RB.shape, s_RB.dtype, B)
    q_CR, s_CB = _results(q_RC, C, R)
    call("requantise", E4M3, R, C, q_RC, s_RB, pow2, q_CR, s_CB.t())
    return q_CR, s_CB


def linear_fp8(x_RK: Tensor, xs_RB: Tensor, w_ENK: Tensor, ws: Tensor, offsets_G: Tensor | None = None) -> Tensor:
    """The product of one expert, or of several over the rows of their groups."""
    (R, K), (E, N, _) = x_RK.shape, w_ENK.shape
    assert w_ENK.shape[2] == K and xs_RB.shape == (R, _tiles(K)), (x_RK.shape, xs_RB.shape, w_ENK.shape)
    assert ws.shape[-2:] == (_tiles(N), _tiles(K)) and xs_RB.dtype == ws.dtype == torch.float32, (ws.shape, ws.dtype)
    ends_G = _ends(offsets_G, R)
    y_RN = x_RK.new_empty((R, N), dtype=torch.bfloat16)
    call("linear", E4M3, len(ends_G), ends_G, E, N, K, x_RK, xs_RB, w_ENK, ws, y_RN)
    return y_RN


def linear_fp8_wgrad_(
    acc_ENK: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor, offsets_G: Tensor | None = None
) -> None:
    (E, N, K), R = acc_ENK.shape, x_KR.shape[1]
    assert acc_ENK.is_contiguous() and acc_ENK.dtype == torch.float32, (acc_ENK.stride(), acc_ENK.dtype)
    assert dy_NR.shape == (N, R) and dys_NB.shape == (N, _tiles(R)), (dy_NR.shape, dys_NB.shape, acc_ENK.shape)
    assert x_KR.shape == (K, R) and xs_KB.shape == (K, _tiles(R)), (x_KR.shape, xs_KB.shape, acc_ENK.shape)
    ends_G = _ends(offsets_G, R)
    call("linear_wgrad", E4M3, len(ends_G), ends_G, E, N, K, dy_NR, dys_NB, x_KR, xs_KB, acc_ENK)


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _results(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Data, and scales stored column by column, not yet written."""
    data = like.new_empty((rows, columns), dtype=E4M3)
    return data, like.new_empty((_tiles(columns), rows), dtype=torch.float32).t()


def _ends(offsets_G: Tensor | None, rows: int) -> Tensor:
    """The rows after the last one of each group; all rows are one group where there are no offsets."""
    if offsets_G is None:
        return torch.tensor([rows], dtype=torch.int32)
    ends = offsets_G.tolist()
    assert offsets_G.dtype == torch.int32 and [0, *ends] == sorted([0, *ends]) and ends[-1] == rows, (ends, rows)
    return offsets_G
