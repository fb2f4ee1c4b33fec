"""SwiGLU of expert rows, each times its gate weight: y = silu(g)·u·gate of h = [g | u]. R rows, I columns a half.

The gate weight is applied here, before the down projection, so that an expert's output need not be kept for its
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from runtime.ops.swiglu import silu_backward, swiglu

# Elements at a time, so that the next pass finds in the cache what this one wrote: 6.5 ms, all at once 7.9 (R 8192,
# I 256, FP32, one core).
BLOCK = 2**17


def gated_swiglu(h_RM: Tensor, gate_R: Tensor) -> Tensor:
    """h_RM [R, 2·I], gate_R -> y_RI."""
    return swiglu(h_RM).mul_(gate_R[:, None])


def gated_swiglu_dgrad(dy_RI: Tensor, h_RM: Tensor, gate_R: Tensor) -> tuple[Tensor, Tensor]:
    """dy_RI, h_RM [R, 2·I], gate_R -> dh_RM, dgate_R."""
    dh_RM, dgate_R = h_RM.new_empty(h_RM.shape), gate_R.new_empty(gate_R.shape)
    rows = max(1, BLOCK // dy_RI.shape[1])
    for block in zip(*(tensor.split(rows) for tensor in (dy_RI, h_RM, gate_R, dh_RM, dgate_R)), strict=True):
        _dgrad_into(*block)
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
