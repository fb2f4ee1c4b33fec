# constructed by dsc: segment final_norm, T=256 D=192, float32
# from spec.resolved:101: mtp
# eps=1e-06 copies=1

from runtime.build.kernels import on_cuda
from runtime.ops import rmsnorm, rmsnorm_dgrad, rmsnorm_wgrad_

rmsnorm = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_wgrad_)


def F(
    norm,  # [192]
    h,  # [256, 192]
):
    """Forward: the outputs, then what the backward will read."""
    y, rmsnorm_0_rstd = rmsnorm(h, norm, 1e-06)  # [256, 192], [256]
    return y, rmsnorm_0_rstd


def I(
    norm,  # [192]
    h,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    d_y,  # [256, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_h = rmsnorm_dgrad(d_y, h, norm, rmsnorm_0_rstd)  # [256, 192]
    return d_h


def W(
    g_norm,  # [192]
    h,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    d_y,  # [256, 192]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    rmsnorm_wgrad_(g_norm, d_y, h, rmsnorm_0_rstd)
