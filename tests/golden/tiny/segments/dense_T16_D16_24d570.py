# constructed by dsc: segment dense, T=16 D=16, float32
# from spec.resolved:62: layers 0..0
# eps=1e-06

import torch

from runtime.kernels import on_cuda
from runtime.ops import (
    linear,
    linear_dgrad,
    linear_wgrad_,
    rmsnorm,
    rmsnorm_dgrad,
    rmsnorm_wgrad_,
    swiglu,
    swiglu_dgrad,
)

rmsnorm = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_wgrad_)
swiglu = on_cuda(__file__, 'swiglu_i32_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i32_float32', swiglu_dgrad)


def F(
    norm,  # [16]
    up,  # [64, 16]
    down,  # [16, 32]
    h,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm(h, norm, 1e-06)  # [16, 16], [16]
    linear_0 = linear(rmsnorm_0, up)  # [16, 64]
    swiglu_0 = swiglu(linear_0)  # [16, 32]
    linear_1 = linear(swiglu_0, down)  # [16, 16]
    y = torch.add(h, linear_1)  # [16, 16]
    return y, rmsnorm_0, rmsnorm_0_rstd, linear_0, swiglu_0


def I(
    norm,  # [16]
    up,  # [64, 16]
    down,  # [16, 32]
    h,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    linear_0,  # [16, 64]
    d_y,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_swiglu_0 = linear_dgrad(d_y, down)  # [16, 32]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [16, 64]
    d_rmsnorm_0 = linear_dgrad(d_linear_0, up)  # [16, 16]
    rmsnorm_dgrad_0 = rmsnorm_dgrad(d_rmsnorm_0, h, norm, rmsnorm_0_rstd)  # [16, 16]
    d_h = torch.add(d_y, rmsnorm_dgrad_0)  # [16, 16]
    return d_h, d_linear_0, d_rmsnorm_0


def W(
    g_norm,  # [16]
    g_up,  # [64, 16]
    g_down,  # [16, 32]
    h,  # [16, 16]
    rmsnorm_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    swiglu_0,  # [16, 32]
    d_y,  # [16, 16]
    d_linear_0,  # [16, 64]
    d_rmsnorm_0,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_down, d_y, swiglu_0)
    linear_wgrad_(g_up, d_linear_0, rmsnorm_0)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, h, rmsnorm_0_rstd)
