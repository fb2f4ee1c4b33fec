# constructed by dsc: segment attention, T=256 D=256, float32
# eps=1e-06 query_rank=96 kv_rank=64 sequence=256 heads=4 nope=32 rope=16 value=32 theta=100.0
# recompute: rmsnorm, mla_up

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
    sum_rmsnorm_again_dgrad_add,
)

mla_attention = on_cuda(__file__, 'mla_attention_s256_h4_n32_r16_v32_float32', mla_attention)
mla_attention_dgrad = on_cuda(__file__, 'mla_attention_dgrad_s256_h4_n32_r16_v32_float32', mla_attention_dgrad)
rmsnorm_d256 = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm)
rmsnorm_d64 = on_cuda(__file__, 'rmsnorm_d64_float32', rmsnorm)
rmsnorm_d96 = on_cuda(__file__, 'rmsnorm_d96_float32', rmsnorm)
rmsnorm_dgrad_d64 = on_cuda(__file__, 'rmsnorm_d64_float32', rmsnorm_dgrad)
rmsnorm_dgrad_d96 = on_cuda(__file__, 'rmsnorm_d96_float32', rmsnorm_dgrad)
rmsnorm_wgrad_d256_ = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm_wgrad_)
rmsnorm_wgrad_d64_ = on_cuda(__file__, 'rmsnorm_d64_float32', rmsnorm_wgrad_)
rmsnorm_wgrad_d96_ = on_cuda(__file__, 'rmsnorm_d96_float32', rmsnorm_wgrad_)
sum_rmsnorm_again_dgrad_add = on_cuda(__file__, 'norm_gradient_d256_float32', sum_rmsnorm_again_dgrad_add)


def F(
    norm,  # [256]
    q_down,  # [96, 256]
    q_norm,  # [96]
    q_up,  # [192, 96]
    kv_down,  # [80, 256]
    kv_norm,  # [64]
    kv_up,  # [256, 64]
    out,  # [256, 128]
    h,  # [256, 256]
):
    """Forward: the outputs, then what the backward will read."""
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm_d256(h, norm, 1e-06)  # [256, 256], [256]
    linear_0 = linear(rmsnorm_0, q_down)  # [256, 96]
    rmsnorm_1, rmsnorm_1_rstd = rmsnorm_d96(linear_0, q_norm, 1e-06)  # [256, 96], [256]
    linear_1 = linear(rmsnorm_1, q_up)  # [256, 192]
    linear_2 = linear(rmsnorm_0, kv_down)  # [256, 80]
    split2_0_a = linear_2[:, 0:64]  # [256, 64]
    rmsnorm_2, rmsnorm_2_rstd = rmsnorm_d64(split2_0_a, kv_norm, 1e-06)  # [256, 64], [256]
    linear_3 = linear(rmsnorm_2, kv_up)  # [256, 256]
    split2_0_b = linear_2[:, 64:80]  # [256, 16]
    mla_attention_0, mla_attention_0_lse = mla_attention(
        linear_1, linear_3, split2_0_b, 256, 4, 32, 16, 32, 100.0
    )  # [256, 128], [1, 4, 256]
    y = linear(mla_attention_0, out)  # [256, 256]
    return h, y, linear_0, linear_2, mla_attention_0, mla_attention_0_lse


def I(
    norm,  # [256]
    q_down,  # [96, 256]
    q_norm,  # [96]
    q_up,  # [192, 96]
    kv_down,  # [80, 256]
    kv_norm,  # [64]
    kv_up,  # [256, 64]
    out,  # [256, 128]
    h,  # [256, 256]
    linear_0,  # [256, 96]
    linear_2,  # [256, 80]
    mla_attention_0,  # [256, 128]
    mla_attention_0_lse,  # [1, 4, 256]
    d_entered,  # [256, 256]
    d_y,  # [256, 256]
):
    """Backward for the inputs: their gradients, then what W will read. _again: what F had, computed again."""
    d_mla_attention_0 = linear_dgrad(d_y, out)  # [256, 128]
    rmsnorm_1_again, rmsnorm_1_rstd_again = rmsnorm_d96(linear_0, q_norm, 1e-06)  # [256, 96], [256]
    linear_1_again = linear(rmsnorm_1_again, q_up)  # [256, 192]
    split2_0_a = linear_2[:, 0:64]  # [256, 64]
    rmsnorm_2_again, rmsnorm_2_rstd_again = rmsnorm_d64(split2_0_a, kv_norm, 1e-06)  # [256, 64], [256]
    linear_3_again = linear(rmsnorm_2_again, kv_up)  # [256, 256]
    split2_0_b = linear_2[:, 64:80]  # [256, 16]
    d_linear_1, d_linear_3, d_split2_0_b = mla_attention_dgrad(
        d_mla_attention_0, linear_1_again, linear_3_again, split2_0_b, mla_attention_0, mla_attention_0_lse, 256, 4, 32,
        16, 32, 100.0
    )  # [256, 192], [256, 256], [256, 16]
    d_rmsnorm_2 = linear_dgrad(d_linear_3, kv_up)  # [256, 64]
    d_split2_0_a = rmsnorm_dgrad_d64(d_rmsnorm_2, split2_0_a, kv_norm, rmsnorm_2_rstd_again)  # [256, 64]
    d_linear_2 = torch.cat((d_split2_0_a, d_split2_0_b), dim=-1)  # [256, 80]
    linear_dgrad_0 = linear_dgrad(d_linear_2, kv_down)  # [256, 256]
    d_rmsnorm_1 = linear_dgrad(d_linear_1, q_up)  # [256, 96]
    d_linear_0 = rmsnorm_dgrad_d96(d_rmsnorm_1, linear_0, q_norm, rmsnorm_1_rstd_again)  # [256, 96]
    linear_dgrad_1 = linear_dgrad(d_linear_0, q_down)  # [256, 256]
    d_rmsnorm_0, rmsnorm_0_again, rmsnorm_0_rstd_again, d_h = sum_rmsnorm_again_dgrad_add(
        linear_dgrad_0, linear_dgrad_1, h, norm, 1e-06, d_entered
    )  # [256, 256], [256, 256], [256], [256, 256]
    return (
        d_h,
        rmsnorm_1_again,
        rmsnorm_1_rstd_again,
        rmsnorm_2_again,
        rmsnorm_2_rstd_again,
        d_linear_1,
        d_linear_3,
        d_rmsnorm_2,
        d_linear_2,
        d_rmsnorm_1,
        d_linear_0,
        d_rmsnorm_0,
        rmsnorm_0_again,
        rmsnorm_0_rstd_again,
    )


def W(
    g_norm,  # [256]
    g_q_down,  # [96, 256]
    g_q_norm,  # [96]
    g_q_up,  # [192, 96]
    g_kv_down,  # [80, 256]
    g_kv_norm,  # [64]
    g_kv_up,  # [256, 64]
    g_out,  # [256, 128]
    h,  # [256, 256]
    linear_0,  # [256, 96]
    linear_2,  # [256, 80]
    mla_attention_0,  # [256, 128]
    d_y,  # [256, 256]
    rmsnorm_1_again,  # [256, 96]
    rmsnorm_1_rstd_again,  # [256]
    rmsnorm_2_again,  # [256, 64]
    rmsnorm_2_rstd_again,  # [256]
    d_linear_1,  # [256, 192]
    d_linear_3,  # [256, 256]
    d_rmsnorm_2,  # [256, 64]
    d_linear_2,  # [256, 80]
    d_rmsnorm_1,  # [256, 96]
    d_linear_0,  # [256, 96]
    d_rmsnorm_0,  # [256, 256]
    rmsnorm_0_again,  # [256, 256]
    rmsnorm_0_rstd_again,  # [256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_out, d_y, mla_attention_0)
    linear_wgrad_(g_kv_up, d_linear_3, rmsnorm_2_again)
    split2_0_a = linear_2[:, 0:64]  # [256, 64]
    rmsnorm_wgrad_d64_(g_kv_norm, d_rmsnorm_2, split2_0_a, rmsnorm_2_rstd_again)
    linear_wgrad_(g_q_up, d_linear_1, rmsnorm_1_again)
    rmsnorm_wgrad_d96_(g_q_norm, d_rmsnorm_1, linear_0, rmsnorm_1_rstd_again)
    linear_wgrad_(g_kv_down, d_linear_2, rmsnorm_0_again)
    linear_wgrad_(g_q_down, d_linear_0, rmsnorm_0_again)
    rmsnorm_wgrad_d256_(g_norm, d_rmsnorm_0, h, rmsnorm_0_rstd_again)
