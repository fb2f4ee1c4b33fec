# constructed by dsc: segment shared, T=16 D=16, float32
# from spec.resolved:72: layers 1..1

from runtime.build.kernels import on_cuda
from runtime.ops import linear, linear_dgrad, linear_wgrad_, swiglu, swiglu_dgrad

swiglu = on_cuda(__file__, 'swiglu_i16_float32', swiglu)
swiglu_dgrad = on_cuda(__file__, 'swiglu_i16_float32', swiglu_dgrad)


def F(
    up,  # [32, 16]
    down,  # [16, 16]
    x,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    linear_0 = linear(x, up)  # [16, 32]
    swiglu_0 = swiglu(linear_0)  # [16, 16]
    y = linear(swiglu_0, down)  # [16, 16]
    return y, linear_0, swiglu_0


def I(
    up,  # [32, 16]
    down,  # [16, 16]
    linear_0,  # [16, 32]
    d_y,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_swiglu_0 = linear_dgrad(d_y, down)  # [16, 16]
    d_linear_0 = swiglu_dgrad(d_swiglu_0, linear_0)  # [16, 32]
    d_x = linear_dgrad(d_linear_0, up)  # [16, 16]
    return d_x, d_linear_0


def W(
    g_up,  # [32, 16]
    g_down,  # [16, 16]
    x,  # [16, 16]
    swiglu_0,  # [16, 16]
    d_y,  # [16, 16]
    d_linear_0,  # [16, 32]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_down, d_y, swiglu_0)
    linear_wgrad_(g_up, d_linear_0, x)
