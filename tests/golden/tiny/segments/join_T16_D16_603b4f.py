# constructed by dsc: segment join, T=16 D=16, float32
# from spec.resolved:72: layers 1..1
# top_k=2

from runtime.build.kernels import on_cuda
from runtime.ops import unpermute_add, unpermute_dgrad

unpermute_add = on_cuda(__file__, 'unpermute_k2_d16_float32', unpermute_add)
unpermute_dgrad = on_cuda(__file__, 'unpermute_k2_d16_float32', unpermute_dgrad)


def F(
    h,  # [16, 16]
    shared,  # [16, 16]
    rows,  # [32, 16]
    order,  # [32] int64
):
    """Forward: the outputs, then what the backward will read."""
    y = unpermute_add(h, shared, rows, order, 2)  # [16, 16]
    return y


def I(
    order,  # [32] int64
    d_y,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_rows = unpermute_dgrad(d_y, order, 2)  # [32, 16]
    return d_y, d_y, d_rows


def W():
    """Backward for the weights: adds to the gradients in the g_ buffers. There are none."""
