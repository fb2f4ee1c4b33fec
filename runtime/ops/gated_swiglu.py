"""SwiGLU of expert rows, each times its gate weight: y = silu(g)·u·gate of h = [g | u]. R rows, I columns a half.

The gate weight is applied here, before the down projection, so that an expert's output need not be kept for its
gradient. Gate weights and their gradients are FP32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from runtime.ops.native import ops as native
from runtime.ops.native.library import takes
from runtime.ops.swiglu import blocks, silu_backward, wide_result
from runtime.ops.wide import wide


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> Tensor:
    """h_RM [R, 2·I], gate_R -> y_RI."""
    if takes(h_RM) and gate_R.dtype == torch.float32:
        return native.swiglu(h_RM, gate_R)
    y_RI = h_RM.new_empty((h_RM.shape[0], h_RM.shape[1] // 2))
    for y_rI, h_rM, gate_r in blocks(y_RI, h_RM, gate_R):
        g_rI, u_rI = h_rM.chunk(2, dim=-1)
        torch.mul(silu(wide(g_rI)).mul_(u_rI), gate_r[:, None], out=y_rI)
    return y_RI


def gated_swiglu_dgrad(dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, h_RM [R, 2·I], gate_R -> dh_RM, dgate_R."""
    if takes(dy_RI, h_RM) and gate_R.dtype == torch.float32:
        return native.gated_swiglu_dgrad(dy_RI, h_RM, gate_R)
    dh_RM, dgate_R = h_RM.new_empty(h_RM.shape), gate_R.new_empty(gate_R.shape)
    for dy_rI, h_rM, gate_r, dh_rM, dgate_r in blocks(dy_RI, h_RM, gate_R, dh_RM, dgate_R):
        result_rM = wide_result(dh_rM)
        _dgrad_into(wide(dy_rI), wide(h_rM), gate_r, result_rM, dgate_r)
        if result_rM is not dh_rM:
            dh_rM.copy_(result_rM)
    return dh_RM, dgate_R


def _dgrad_into(dy_rI: Tensor, h_rM: Tensor, gate_r: Tensor, dh_rM: Tensor, dgate_r: Tensor) -> None:
    """The gradients of a block of rows, written into `dh_rM` and `dgate_r`."""
    g_rI, u_rI = h_rM.chunk(2, dim=-1)
    dg_rI, du_rI = dh_rM.chunk(2, dim=-1)
    buffer_rI = silu(g_rI).mul_(dy_rI)
    torch.linalg.vecdot(buffer_rI, u_rI, out=dgate_r)
    torch.mul(buffer_rI, gate_r[:, None], out=du_rI)
    torch.mul(dy_rI, u_rI, out=buffer_rI)
    silu_backward(buffer_rI.mul_(gate_r[:, None]), g_rI, grad_input=dg_rI)


OPS = (gated_swiglu, gated_swiglu_dgrad)
