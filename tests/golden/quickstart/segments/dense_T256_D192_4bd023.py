# constructed by dsc: segment dense, T=256 D=192, float32
# from spec.resolved:71: layers 0..0
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

rmsnorm = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_wgrad_)
swiglu = on_cuda(__file__, 'swiglu_i512_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i512_float32', swiglu_dgrad)


def F(
    norm,  # [192]
    up,  # [1024, 192]
    down,  # [192, 512]
    h,  # [256, 192]
):
    """Forward: the outputs, then what the backward will read."""
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm(h, norm, 1e-06)  # [256, 192], [256]
    linear_0 = linear(rmsnorm_0, up)  # [256, 1024]
    swiglu_0 = swiglu(linear_0)  # [256, 512]
    linear_1 = linear(swiglu_0, down)  # [256, 192]
    y = torch.add(h, linear_1)  # [256, 192]
    return y, rmsnorm_0, rmsnorm_0_rstd, linear_0, swiglu_0


def I(
    norm,  # [192]
    up,  # [1024, 192]
    down,  # [192, 512]
    h,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    linear_0,  # [256, 1024]
    d_y,  # [256, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_swiglu_0 = linear_dgrad(d_y, down)  # [256, 512]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [256, 1024]
    d_rmsnorm_0 = linear_dgrad(d_linear_0, up)  # [256, 192]
    rmsnorm_dgrad_0 = rmsnorm_dgrad(d_rmsnorm_0, h, norm, rmsnorm_0_rstd)  # [256, 192]
    d_h = torch.add(d_y, rmsnorm_dgrad_0)  # [256, 192]
    return d_h, d_linear_0, d_rmsnorm_0


def W(
    g_norm,  # [192]
    g_up,  # [1024, 192]
    g_down,  # [192, 512]
    h,  # [256, 192]
    rmsnorm_0,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    swiglu_0,  # [256, 512]
    d_y,  # [256, 192]
    d_linear_0,  # [256, 1024]
    d_rmsnorm_0,  # [256, 192]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_down, d_y, swiglu_0)
    linear_wgrad_(g_up, d_linear_0, rmsnorm_0)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, h, rmsnorm_0_rstd)
