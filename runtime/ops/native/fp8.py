"""Ops on E4M3 numbers in C++: functions of the names, arguments and results of those in `runtime.ops`, where
`library.takes` their operands. Scales may lie by rows or by columns; those that are returned lie as `quantise` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native.library import call

E4M3 = torch.float8_e4m3fn
TILE = 128


def quantise(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    q_RC, s_BR = _results(*x_RC.shape)
    call("quantise", x_RC.dtype, *x_RC.shape, x_RC, pow2, q_RC, s_BR)
    return q_RC, s_BR.t()


def quantise_columns(x_RC: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    R, C = x_RC.shape
    q_CR, s_BC = _results(C, R)
    call("quantise_columns", x_RC.dtype, R, C, x_RC, pow2, q_CR, s_BC)
    return q_CR, s_BC.t()


def quantise_blocks(w_NK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor]:
    *experts, N, K = w_NK.shape
    q_NK, q_KN = w_NK.new_empty(w_NK.shape, dtype=E4M3), w_NK.new_empty((*experts, K, N), dtype=E4M3)
    s = w_NK.new_empty((*experts, _tiles(N), _tiles(K)), dtype=torch.float32)
    call("quantise_blocks", w_NK.dtype, *(experts or (1,)), N, K, w_NK, pow2, q_NK, s, q_KN)
    return q_NK, s, q_KN


def requantise(q_RC: Tensor, s_RB: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    R, C = _check(q_RC, s_RB)
    q_CR, s_BC = _results(C, R)
    call("requantise", E4M3, R, C, q_RC, s_RB, pow2, q_CR, s_BC)
    return q_CR, s_BC.t()


def dequantise(q_RC: Tensor, s_RB: Tensor) -> Tensor:
    """x_RC (FP32) of tiles of rows."""
    R, C = _check(q_RC, s_RB)
    x_RC = torch.empty((R, C), dtype=torch.float32)
    call("dequantise", E4M3, R, C, q_RC, s_RB, x_RC)
    return x_RC


def linear_fp8(x_RK: Tensor, xs_RB: Tensor, w: Tensor, ws: Tensor, offsets_G: Tensor | None = None) -> Tensor:
    """The product with w_NK, or with w_ENK of several experts, each over the rows of its groups."""
    (R, K), (*experts, N, _) = _check(x_RK, xs_RB), w.shape
    assert w.shape[-1] == K and ws.dtype == torch.float32, (x_RK.shape, w.shape, ws.dtype)
    assert ws.shape == (*experts, _tiles(N), _tiles(K)), (ws.shape, w.shape)
    y_RN = torch.empty((R, N), dtype=torch.bfloat16)
    groups = _groups(offsets_G, R)
    call("linear", E4M3, groups, offsets_G, R, *(experts or (1,)), N, K, x_RK, xs_RB, w, ws, y_RN)
    return y_RN


def linear_fp8_wgrad_(
    acc: Tensor, dy_NR: Tensor, dys_NB: Tensor, x_KR: Tensor, xs_KB: Tensor, offsets_G: Tensor | None = None
) -> None:
    """acc_NK += dw_NK, or acc_ENK of several experts."""
    (N, R), (K, same_R) = _check(dy_NR, dys_NB), _check(x_KR, xs_KB)
    *experts, _, _ = acc.shape
    assert same_R == R and acc.shape == (*experts, N, K), (acc.shape, dy_NR.shape, x_KR.shape)
    assert acc.is_contiguous() and acc.dtype == torch.float32, (acc.stride(), acc.dtype)
    groups = _groups(offsets_G, R)
    call("linear_wgrad", E4M3, groups, offsets_G, R, *(experts or (1,)), N, K, dy_NR, dys_NB, x_KR, xs_KB, acc)


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _check(q_RC: Tensor, s_RB: Tensor) -> tuple[int, int]:
    """Rows and columns of data in tiles of rows."""
    R, C = q_RC.shape
    assert s_RB.shape == (R, _tiles(C)) and s_RB.dtype == torch.float32, (q_RC.shape, s_RB.shape, s_RB.dtype)
    return R, C


def _results(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Data, and scales [tiles of a row, rows], not yet written."""
    return torch.empty((rows, columns), dtype=E4M3), torch.empty((_tiles(columns), rows), dtype=torch.float32)


def _groups(offsets_G: Tensor | None, rows: int) -> int:
    """How many groups there are: all rows are one where there are no offsets."""
    if offsets_G is None:
        return 1
    ends = [0, *offsets_G.tolist()]
    assert offsets_G.dtype == torch.int32 and ends == sorted(ends) and ends[-1] == rows, (ends, rows)
    return len(ends) - 1
