# constructed by dsc: segment attention, T=16 D=16, float32
# from spec.resolved:54: attention mla
# eps=1e-06 query_rank=8 kv_rank=8 sequence=16 heads=2 nope=8 rope=4 value=8 theta=10000.0

import torch

from runtime.build.kernels import on_cuda
from runtime.ops import (
    linear,
    linear_dgrad,
    linear_wgrad_,
    mla_attention,
    mla_attention_dgrad,
    rmsnorm,
    rmsnorm_dgrad,
    rmsnorm_wgrad_,
    sum_rmsnorm_dgrad_add,
)

mla_attention = on_cuda(__file__, 'mla_attention_s16_h2_n8_r4_v8_float32', mla_attention)
mla_attention_dgrad = on_cuda(__file__, 'mla_attention_dgrad_s16_h2_n8_r4_v8_float32', mla_attention_dgrad)
rmsnorm_d16 = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm)
rmsnorm_d8 = on_cuda(__file__, 'rmsnorm_d8_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d8_float32', rmsnorm_dgrad)
rmsnorm_wgrad_d16_ = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_wgrad_)
rmsnorm_wgrad_d8_ = on_cuda(__file__, 'rmsnorm_d8_float32', rmsnorm_wgrad_)
sum_rmsnorm_dgrad_add = on_cuda(__file__, 'norm_gradient_d16_float32', sum_rmsnorm_dgrad_add)


def F(
    norm,  # [16]
    q_down,  # [8, 16]
    q_norm,  # [8]
    q_up,  # [24, 8]
    kv_down,  # [12, 16]
    kv_norm,  # [8]
    kv_up,  # [32, 8]
    out,  # [16, 16]
    h,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm_d16(h, norm, 1e-06)  # [16, 16], [16]
    linear_0 = linear(rmsnorm_0, q_down)  # [16, 8]
    rmsnorm_1, rmsnorm_1_rstd = rmsnorm_d8(linear_0, q_norm, 1e-06)  # [16, 8], [16]
    linear_1 = linear(rmsnorm_1, q_up)  # [16, 24]
    linear_2 = linear(rmsnorm_0, kv_down)  # [16, 12]
    split2_0_a = linear_2[:, 0:8]  # [16, 8]
    rmsnorm_2, rmsnorm_2_rstd = rmsnorm_d8(split2_0_a, kv_norm, 1e-06)  # [16, 8], [16]
    linear_3 = linear(rmsnorm_2, kv_up)  # [16, 32]
    split2_0_b = linear_2[:, 8:12]  # [16, 4]
    mla_attention_0, mla_attention_0_lse = mla_attention(
        linear_1, linear_3, split2_0_b, 16, 2, 8, 4, 8, 10000.0
    )  # [16, 16], [1, 2, 16]
    y = linear(mla_attention_0, out)  # [16, 16]
    return (
        h,
        y,
        rmsnorm_0,
        rmsnorm_0_rstd,
        linear_0,
        rmsnorm_1,
        rmsnorm_1_rstd,
        linear_1,
        linear_2,
        rmsnorm_2,
        rmsnorm_2_rstd,
        linear_3,
        mla_attention_0,
        mla_attention_0_lse,
    )


def I(
    norm,  # [16]
    q_down,  # [8, 16]
    q_norm,  # [8]
    q_up,  # [24, 8]
    kv_down,  # [12, 16]
    kv_norm,  # [8]
    kv_up,  # [32, 8]
    out,  # [16, 16]
    h,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    linear_0,  # [16, 8]
    rmsnorm_1_rstd,  # [16]
    linear_1,  # [16, 24]
    linear_2,  # [16, 12]
    rmsnorm_2_rstd,  # [16]
    linear_3,  # [16, 32]
    mla_attention_0,  # [16, 16]
    mla_attention_0_lse,  # [1, 2, 16]
    d_entered,  # [16, 16]
    d_y,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_mla_attention_0 = linear_dgrad(d_y, out)  # [16, 16]
    split2_0_b = linear_2[:, 8:12]  # [16, 4]
    d_linear_1, d_linear_3, d_split2_0_b = mla_attention_dgrad(
        d_mla_attention_0, linear_1, linear_3, split2_0_b, mla_attention_0, mla_attention_0_lse, 16, 2, 8, 4, 8, 10000.0
    )  # [16, 24], [16, 32], [16, 4]
    d_rmsnorm_2 = linear_dgrad(d_linear_3, kv_up)  # [16, 8]
    split2_0_a = linear_2[:, 0:8]  # [16, 8]
    d_split2_0_a = rmsnorm_dgrad(d_rmsnorm_2, split2_0_a, kv_norm, rmsnorm_2_rstd)  # [16, 8]
    d_linear_2 = torch.cat((d_split2_0_a, d_split2_0_b), dim=-1)  # [16, 12]
    linear_dgrad_0 = linear_dgrad(d_linear_2, kv_down)  # [16, 16]
    d_rmsnorm_1 = linear_dgrad(d_linear_1, q_up)  # [16, 8]
    d_linear_0 = rmsnorm_dgrad(d_rmsnorm_1, linear_0, q_norm, rmsnorm_1_rstd)  # [16, 8]
    linear_dgrad_1 = linear_dgrad(d_linear_0, q_down)  # [16, 16]
    d_rmsnorm_0, d_h = sum_rmsnorm_dgrad_add(
        linear_dgrad_0, linear_dgrad_1, h, norm, rmsnorm_0_rstd, d_entered
    )  # [16, 16], [16, 16]
    return d_h, d_linear_1, d_linear_3, d_rmsnorm_2, d_linear_2, d_rmsnorm_1, d_linear_0, d_rmsnorm_0


def W(
    g_norm,  # [16]
    g_q_down,  # [8, 16]
    g_q_norm,  # [8]
    g_q_up,  # [24, 8]
    g_kv_down,  # [12, 16]
    g_kv_norm,  # [8]
    g_kv_up,  # [32, 8]
    g_out,  # [16, 16]
    h,  # [16, 16]
    rmsnorm_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    linear_0,  # [16, 8]
    rmsnorm_1,  # [16, 8]
    rmsnorm_1_rstd,  # [16]
    linear_2,  # [16, 12]
    rmsnorm_2,  # [16, 8]
    rmsnorm_2_rstd,  # [16]
    mla_attention_0,  # [16, 16]
    d_y,  # [16, 16]
    d_linear_1,  # [16, 24]
    d_linear_3,  # [16, 32]
    d_rmsnorm_2,  # [16, 8]
    d_linear_2,  # [16, 12]
    d_rmsnorm_1,  # [16, 8]
    d_linear_0,  # [16, 8]
    d_rmsnorm_0,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_out, d_y, mla_attention_0)
    linear_wgrad_(g_kv_up, d_linear_3, rmsnorm_2)
    split2_0_a = linear_2[:, 0:8]  # [16, 8]
    rmsnorm_wgrad_d8_(g_kv_norm, d_rmsnorm_2, split2_0_a, rmsnorm_2_rstd)
    linear_wgrad_(g_kv_down, d_linear_2, rmsnorm_0)
    linear_wgrad_(g_q_up, d_linear_1, rmsnorm_1)
    rmsnorm_wgrad_d8_(g_q_norm, d_rmsnorm_1, linear_0, rmsnorm_1_rstd)
    linear_wgrad_(g_q_down, d_linear_0, rmsnorm_0)
    rmsnorm_wgrad_d16_(g_norm, d_rmsnorm_0, h, rmsnorm_0_rstd)
