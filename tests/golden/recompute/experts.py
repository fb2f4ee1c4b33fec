# constructed by dsc: segment experts, D=256 E=8, float32
# R: rows received, any number
# recompute: swiglu

from runtime.build.kernels import on_cuda
from runtime.ops import gated_swiglu, gated_swiglu_dgrad, grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad_

gated_swiglu = on_cuda(__file__, 'swiglu_i128_float32', gated_swiglu)
gated_swiglu_dgrad = on_cuda(__file__, 'swiglu_i128_float32', gated_swiglu_dgrad)
grouped_linear_e8_n256_k128 = on_cuda(__file__, 'grouped_linear_e8_n256_k128_float32', grouped_linear)
grouped_linear_e8_n256_k256 = on_cuda(__file__, 'grouped_linear_e8_n256_k256_float32', grouped_linear)
grouped_linear_dgrad_e8_n256_k128 = on_cuda(__file__, 'grouped_linear_e8_n256_k128_float32', grouped_linear_dgrad)
grouped_linear_dgrad_e8_n256_k256 = on_cuda(__file__, 'grouped_linear_e8_n256_k256_float32', grouped_linear_dgrad)
grouped_linear_wgrad_e8_n256_k128_ = on_cuda(__file__, 'grouped_linear_e8_n256_k128_float32', grouped_linear_wgrad_)
grouped_linear_wgrad_e8_n256_k256_ = on_cuda(__file__, 'grouped_linear_e8_n256_k256_float32', grouped_linear_wgrad_)


def F(
    up,  # [8, 256, 256]
    down,  # [8, 256, 128]
    rows,  # [R, 256]
    gate,  # [R]
    offsets,  # [8] int32
):
    """Forward: the outputs, then what the backward will read."""
    grouped_linear_0 = grouped_linear_e8_n256_k256(rows, up, offsets)  # [R, 256]
    gated_swiglu_0 = gated_swiglu(grouped_linear_0, gate)  # [R, 128]
    y = grouped_linear_e8_n256_k128(gated_swiglu_0, down, offsets)  # [R, 256]
    return y, grouped_linear_0


def I(
    up,  # [8, 256, 256]
    down,  # [8, 256, 128]
    gate,  # [R]
    offsets,  # [8] int32
    grouped_linear_0,  # [R, 256]
    d_y,  # [R, 256]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_gated_swiglu_0 = grouped_linear_dgrad_e8_n256_k128(d_y, down, offsets)  # [R, 128]
    d_grouped_linear_0, d_gate = gated_swiglu_dgrad(d_gated_swiglu_0, grouped_linear_0, gate)  # [R, 256], [R]
    d_rows = grouped_linear_dgrad_e8_n256_k256(d_grouped_linear_0, up, offsets)  # [R, 256]
    return d_rows, d_gate, d_grouped_linear_0


def W(
    g_up,  # [8, 256, 256]
    g_down,  # [8, 256, 128]
    rows,  # [R, 256]
    gate,  # [R]
    offsets,  # [8] int32
    grouped_linear_0,  # [R, 256]
    d_y,  # [R, 256]
    d_grouped_linear_0,  # [R, 256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers. _again: what F had, computed again."""
    gated_swiglu_0_again = gated_swiglu(grouped_linear_0, gate)  # [R, 128]
    grouped_linear_wgrad_e8_n256_k128_(g_down, d_y, gated_swiglu_0_again, offsets)
    grouped_linear_wgrad_e8_n256_k256_(g_up, d_grouped_linear_0, rows, offsets)
