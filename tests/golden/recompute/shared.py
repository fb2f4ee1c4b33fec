# constructed by dsc: segment shared, T=256 D=256, float32
# recompute: rmsnorm, swiglu

from runtime.build.kernels import on_cuda
from runtime.ops import linear, linear_dgrad, linear_wgrad_, rmsnorm, swiglu, swiglu_dgrad

rmsnorm = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm)
swiglu = on_cuda(__file__, 'swiglu_i128_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i128_float32', swiglu_dgrad)


def F(
    norm,  # [256]
    up,  # [256, 256]
    down,  # [256, 128]
    x,  # [256, 256]
    h,  # [256, 256]
):
    """Forward: the outputs, then what the backward will read."""
    linear_0 = linear(x, up)  # [256, 256]
    swiglu_0 = swiglu(linear_0)  # [256, 128]
    y = linear(swiglu_0, down)  # [256, 256]
    return y, linear_0


def I(
    norm,  # [256]
    up,  # [256, 256]
    down,  # [256, 128]
    h,  # [256, 256]
    linear_0,  # [256, 256]
    d_y,  # [256, 256]
):
    """Backward for the inputs: their gradients, then what W will read. _again: what F had, computed again."""
    d_swiglu_0 = linear_dgrad(d_y, down)  # [256, 128]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [256, 256]
    d_x = linear_dgrad(d_linear_0, up)  # [256, 256]
    x_again, x_rstd_again = rmsnorm(h, norm, 1e-06)  # [256, 256], [256]
    return d_x, d_linear_0, x_again


def W(
    g_up,  # [256, 256]
    g_down,  # [256, 128]
    linear_0,  # [256, 256]
    d_y,  # [256, 256]
    d_linear_0,  # [256, 256]
    x_again,  # [256, 256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers. _again: what F had, computed again."""
    swiglu_0_again = swiglu(linear_0)  # [256, 128]
    linear_wgrad_(g_down, d_y, swiglu_0_again)
    linear_wgrad_(g_up, d_linear_0, x_again)
