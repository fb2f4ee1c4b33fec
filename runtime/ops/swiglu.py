"""SwiGLU: y = silu(g)·u of h = [g | u]. T rows, I columns in each half. Shazeer, "GLU variants", 2020."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

silu_backward = torch.ops.aten.silu_backward.grad_input  # (dy, x, grad_input=dx), written into a view


def swiglu(h_TM: Tensor) -> Tensor:
    """h_TM [T, 2·I] -> y_TI."""
    g_TI, u_TI = h_TM.chunk(2, dim=-1)
    return silu(g_TI).mul_(u_TI)


def swiglu_dgrad(dy_TI: Tensor, h_TM: Tensor) -> Tensor:
    """dy_TI, h_TM [T, 2·I] -> dh_TM."""
    g_TI, u_TI = h_TM.chunk(2, dim=-1)
    dh_TM = h_TM.new_empty(h_TM.shape)
    dg_TI, du_TI = dh_TM.chunk(2, dim=-1)
    torch.mul(dy_TI, silu(g_TI), out=du_TI)
    silu_backward(dy_TI * u_TI, g_TI, grad_input=dg_TI)
    return dh_TM
