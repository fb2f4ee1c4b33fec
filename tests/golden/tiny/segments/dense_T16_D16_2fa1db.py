# constructed by dsc: segment dense, T=16 D=16, float32
# from spec.resolved:67: layers 0..0
# eps=1e-06

import torch

from runtime.build.kernels import on_cuda
from runtime.ops import (
    add_rmsnorm,
    linear,
    linear_dgrad,
    linear_wgrad_,
    rmsnorm_dgrad_add,
    rmsnorm_wgrad_,
    swiglu,
    swiglu_dgrad,
)

add_rmsnorm = on_cuda(__file__, 'rmsnorm_d16_float32', add_rmsnorm)
rmsnorm_dgrad_add = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_dgrad_add)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_wgrad_)
swiglu = on_cuda(__file__, 'swiglu_i32_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i32_float32', swiglu_dgrad)


def F(
    norm,  # [16]
    up,  # [64, 16]
    down,  # [16, 32]
    h,  # [16, 16]
    y,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    add_0, rmsnorm_0, rmsnorm_0_rstd = add_rmsnorm(h, y, norm, 1e-06)  # [16, 16], [16, 16], [16]
    linear_0 = linear(rmsnorm_0, up)  # [16, 64]
    swiglu_0 = swiglu(linear_0)  # [16, 32]
    linear_1 = linear(swiglu_0, down)  # [16, 16]
    out = torch.add(add_0, linear_1)  # [16, 16]
    return out, add_0, rmsnorm_0, rmsnorm_0_rstd, linear_0, swiglu_0


def I(
    norm,  # [16]
    up,  # [64, 16]
    down,  # [16, 32]
    add_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    linear_0,  # [16, 64]
    d_out,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_swiglu_0 = linear_dgrad(d_out, down)  # [16, 32]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [16, 64]
    d_rmsnorm_0 = linear_dgrad(d_linear_0, up)  # [16, 16]
    d_add_0 = rmsnorm_dgrad_add(d_rmsnorm_0, add_0, norm, rmsnorm_0_rstd, d_out)  # [16, 16]
    return d_add_0, d_add_0, d_linear_0, d_rmsnorm_0


def W(
    g_norm,  # [16]
    g_up,  # [64, 16]
    g_down,  # [16, 32]
    add_0,  # [16, 16]
    rmsnorm_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    swiglu_0,  # [16, 32]
    d_out,  # [16, 16]
    d_linear_0,  # [16, 64]
    d_rmsnorm_0,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_down, d_out, swiglu_0)
    linear_wgrad_(g_up, d_linear_0, rmsnorm_0)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, add_0, rmsnorm_0_rstd)
