# constructed by dsc: segment shared, T=256 D=192, float32
# from spec.resolved:84: layers 1..3

from runtime.build.kernels import on_cuda
from runtime.ops import linear, linear_dgrad, linear_wgrad_, swiglu, swiglu_dgrad

swiglu = on_cuda(__file__, 'swiglu_i128_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i128_float32', swiglu_dgrad)


def F(
    up,  # [256, 192]
    down,  # [192, 128]
    x,  # [256, 192]
):
    """Forward: the outputs, then what the backward will read."""
    linear_0 = linear(x, up)  # [256, 256]
    swiglu_0 = swiglu(linear_0)  # [256, 128]
    y = linear(swiglu_0, down)  # [256, 192]
    return y, linear_0, swiglu_0


def I(
    up,  # [256, 192]
    down,  # [192, 128]
    linear_0,  # [256, 256]
    d_y,  # [256, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_swiglu_0 = linear_dgrad(d_y, down)  # [256, 128]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [256, 256]
    d_x = linear_dgrad(d_linear_0, up)  # [256, 192]
    return d_x, d_linear_0


def W(
    g_up,  # [256, 192]
    g_down,  # [192, 128]
    x,  # [256, 192]
    swiglu_0,  # [256, 128]
    d_y,  # [256, 192]
    d_linear_0,  # [256, 256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_down, d_y, swiglu_0)
    linear_wgrad_(g_up, d_linear_0, x)
