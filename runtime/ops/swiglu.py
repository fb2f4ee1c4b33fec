"""SwiGLU: y = silu(g)·u of h = [g | u]. T rows, I columns in each half. Shazeer, "GLU variants", 2020."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import silu

from runtime.ops.native import ops as native
from runtime.ops.native.library import takes
from runtime.ops.wide import wide

# Elements at a time, so that the next pass finds in the cache what this one wrote: 6.5 ms, all at once 7.9 (gradients
# of gated rows, 8192 × 256, FP32, one core).
BLOCK = 2**17

silu_backward = torch.ops.aten.silu_backward.grad_input  # (dy, x, grad_input=dx), written into a view


def swiglu(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI."""
    if takes(h_TM):
        return native.swiglu(h_TM)
    y_TI = h_TM.new_empty((h_TM.shape[0], h_TM.shape[1] // 2))
    for y_tI, h_tM in blocks(y_TI, h_TM):
        g_tI, u_tI = h_tM.chunk(2, dim=-1)
        torch.mul(silu(wide(g_tI)), u_tI, out=y_tI)
    return y_TI


def swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    if takes(dy_TI, h_TM):
        return native.swiglu_dgrad(dy_TI, h_TM)
    dh_TM = h_TM.new_empty(h_TM.shape)
    for dy_tI, h_tM, dh_tM in blocks(dy_TI, h_TM, dh_TM):
        dy_tI, h_tM, result_tM = wide(dy_tI), wide(h_tM), wide_result(dh_tM)
        g_tI, u_tI = h_tM.chunk(2, dim=-1)
        dg_tI, du_tI = result_tM.chunk(2, dim=-1)
        torch.mul(dy_tI, silu(g_tI), out=du_tI)
        silu_backward(dy_tI * u_tI, g_tI, grad_input=dg_tI)
        if result_tM is not dh_tM:
            dh_tM.copy_(result_tM)
    return dh_TM


def wide_result(x: Tensor) -> Tensor:
    """Where to put the result x: x itself, or an FP32 buffer to be rounded into it."""
    return torch.empty_like(x, dtype=torch.float32) if x.dtype == torch.bfloat16 else x


def blocks(*by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """A few rows of each tensor at a time; the first has the width that counts."""
    rows = max(1, BLOCK // by_row[0].shape[1])
    return zip(*(tensor.split(rows) for tensor in by_row), strict=True)


OPS = (swiglu, swiglu_dgrad)
