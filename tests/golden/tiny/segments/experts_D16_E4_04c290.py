# constructed by dsc: segment experts, D=16 E=4, float32
# from spec.resolved:72: layers 1..1
# R: rows received, any number

from runtime.build.kernels import on_cuda
from runtime.ops import gated_swiglu, gated_swiglu_dgrad, grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad_

gated_swiglu = on_cuda(__file__, 'swiglu_i16_float32', gated_swiglu)
gated_swiglu_dgrad = on_cuda(__file__, 'swiglu_i16_float32', gated_swiglu_dgrad)
grouped_linear_e4_n16_k16 = on_cuda(__file__, 'grouped_linear_e4_n16_k16_float32', grouped_linear)
grouped_linear_e4_n32_k16 = on_cuda(__file__, 'grouped_linear_e4_n32_k16_float32', grouped_linear)
grouped_linear_dgrad_e4_n16_k16 = on_cuda(__file__, 'grouped_linear_e4_n16_k16_float32', grouped_linear_dgrad)
grouped_linear_dgrad_e4_n32_k16 = on_cuda(__file__, 'grouped_linear_e4_n32_k16_float32', grouped_linear_dgrad)
grouped_linear_wgrad_e4_n16_k16_ = on_cuda(__file__, 'grouped_linear_e4_n16_k16_float32', grouped_linear_wgrad_)
grouped_linear_wgrad_e4_n32_k16_ = on_cuda(__file__, 'grouped_linear_e4_n32_k16_float32', grouped_linear_wgrad_)


def F(
    up,  # [4, 32, 16]
    down,  # [4, 16, 16]
    rows,  # [R, 16]
    gate,  # [R]
    offsets,  # [4] int32
):
    """Forward: the outputs, then what the backward will read."""
    grouped_linear_0 = grouped_linear_e4_n32_k16(rows, up, offsets)  # [R, 32]
    gated_swiglu_0 = gated_swiglu(grouped_linear_0, gate)  # [R, 16]
    y = grouped_linear_e4_n16_k16(gated_swiglu_0, down, offsets)  # [R, 16]
    return y, grouped_linear_0, gated_swiglu_0


def I(
    up,  # [4, 32, 16]
    down,  # [4, 16, 16]
    gate,  # [R]
    offsets,  # [4] int32
    grouped_linear_0,  # [R, 32]
    d_y,  # [R, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_gated_swiglu_0 = grouped_linear_dgrad_e4_n16_k16(d_y, down, offsets)  # [R, 16]
    d_grouped_linear_0, d_gate = gated_swiglu_dgrad(d_gated_swiglu_0, grouped_linear_0, gate)  # [R, 32], [R]
    d_rows = grouped_linear_dgrad_e4_n32_k16(d_grouped_linear_0, up, offsets)  # [R, 16]
    return d_rows, d_gate, d_grouped_linear_0


def W(
    g_up,  # [4, 32, 16]
    g_down,  # [4, 16, 16]
    rows,  # [R, 16]
    offsets,  # [4] int32
    gated_swiglu_0,  # [R, 16]
    d_y,  # [R, 16]
    d_grouped_linear_0,  # [R, 32]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    grouped_linear_wgrad_e4_n16_k16_(g_down, d_y, gated_swiglu_0, offsets)
    grouped_linear_wgrad_e4_n32_k16_(g_up, d_grouped_linear_0, rows, offsets)
