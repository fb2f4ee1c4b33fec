# constructed by dsc: segment join, T=256 D=192, float32
# from spec.resolved:84: layers 1..3
# top_k=4

from runtime.build.kernels import on_cuda
from runtime.ops import unpermute_add, unpermute_dgrad

unpermute_add = on_cuda(__file__, 'unpermute_k4_d192_float32', unpermute_add)
unpermute_dgrad = on_cuda(__file__, 'unpermute_k4_d192_float32', unpermute_dgrad)


def F(
    h,  # [256, 192]
    shared,  # [256, 192]
    rows,  # [1024, 192]
    order,  # [1024] int64
):
    """Forward: the outputs, then what the backward will read."""
    y = unpermute_add(h, shared, rows, order, 4)  # [256, 192]
    return y


def I(
    order,  # [1024] int64
    d_y,  # [256, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_rows = unpermute_dgrad(d_y, order, 4)  # [1024, 192]
    return d_y, d_y, d_rows


def W():
    """Backward for the weights: adds to the gradients in the g_ buffers. There are none."""
