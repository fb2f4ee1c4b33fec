# constructed by dsc: segment experts, D=192 E=8, float32
# from spec.resolved:84: layers 1..3
# R: rows received, any number

from runtime.build.kernels import on_cuda
from runtime.ops import gated_swiglu, gated_swiglu_dgrad, grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad_

gated_swiglu = on_cuda(__file__, 'swiglu_i128_float32', gated_swiglu)
gated_swiglu_dgrad = on_cuda(__file__, 'swiglu_i128_float32', gated_swiglu_dgrad)
grouped_linear_e8_n192_k128 = on_cuda(__file__, 'grouped_linear_e8_n192_k128_float32', grouped_linear)
grouped_linear_e8_n256_k192 = on_cuda(__file__, 'grouped_linear_e8_n256_k192_float32', grouped_linear)
grouped_linear_dgrad_e8_n192_k128 = on_cuda(__file__, 'grouped_linear_e8_n192_k128_float32', grouped_linear_dgrad)
grouped_linear_dgrad_e8_n256_k192 = on_cuda(__file__, 'grouped_linear_e8_n256_k192_float32', grouped_linear_dgrad)
grouped_linear_wgrad_e8_n192_k128_ = on_cuda(__file__, 'grouped_linear_e8_n192_k128_float32', grouped_linear_wgrad_)
grouped_linear_wgrad_e8_n256_k192_ = on_cuda(__file__, 'grouped_linear_e8_n256_k192_float32', grouped_linear_wgrad_)


def F(
    up,  # [8, 256, 192]
    down,  # [8, 192, 128]
    rows,  # [R, 192]
    gate,  # [R]
    offsets,  # [8] int32
):
    """Forward: the outputs, then what the backward will read."""
    grouped_linear_0 = grouped_linear_e8_n256_k192(rows, up, offsets)  # [R, 256]
    gated_swiglu_0 = gated_swiglu(grouped_linear_0, gate)  # [R, 128]
    y = grouped_linear_e8_n192_k128(gated_swiglu_0, down, offsets)  # [R, 192]
    return y, grouped_linear_0, gated_swiglu_0


def I(
    up,  # [8, 256, 192]
    down,  # [8, 192, 128]
    gate,  # [R]
    offsets,  # [8] int32
    grouped_linear_0,  # [R, 256]
    d_y,  # [R, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_gated_swiglu_0 = grouped_linear_dgrad_e8_n192_k128(d_y, down, offsets)  # [R, 128]
    d_grouped_linear_0, d_gate = gated_swiglu_dgrad(d_gated_swiglu_0, grouped_linear_0, gate)  # [R, 256], [R]
    d_rows = grouped_linear_dgrad_e8_n256_k192(d_grouped_linear_0, up, offsets)  # [R, 192]
    return d_rows, d_gate, d_grouped_linear_0


def W(
    g_up,  # [8, 256, 192]
    g_down,  # [8, 192, 128]
    rows,  # [R, 192]
    offsets,  # [8] int32
    gated_swiglu_0,  # [R, 128]
    d_y,  # [R, 192]
    d_grouped_linear_0,  # [R, 256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    grouped_linear_wgrad_e8_n192_k128_(g_down, d_y, gated_swiglu_0, offsets)
    grouped_linear_wgrad_e8_n256_k192_(g_up, d_grouped_linear_0, rows, offsets)
