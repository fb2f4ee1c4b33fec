# constructed by dsc: segment mtp_input, T=256 D=256, float32
# eps=1e-06
# recompute: rmsnorm

import torch

from runtime.build.kernels import on_cuda
from runtime.ops import (
    embedding,
    embedding_wgrad_,
    linear,
    linear_dgrad,
    linear_wgrad_,
    rmsnorm,
    rmsnorm_dgrad,
    rmsnorm_wgrad_,
)

embedding = on_cuda(__file__, 'embedding_d256_float32', embedding)
embedding_wgrad_ = on_cuda(__file__, 'embedding_d256_float32', embedding_wgrad_)
rmsnorm = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm_wgrad_)


def F(
    table,  # [4096, 256]
    embedding_norm,  # [256]
    hidden_norm,  # [256]
    projection,  # [256, 512]
    tokens,  # [256] int64
    h,  # [256, 256]
):
    """Forward: the outputs, then what the backward will read."""
    embedding_0 = embedding(tokens, table)  # [256, 256]
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm(embedding_0, embedding_norm, 1e-06)  # [256, 256], [256]
    rmsnorm_1, rmsnorm_1_rstd = rmsnorm(h, hidden_norm, 1e-06)  # [256, 256], [256]
    cat2_0 = torch.cat((rmsnorm_0, rmsnorm_1), dim=-1)  # [256, 512]
    y = linear(cat2_0, projection)  # [256, 256]
    return y, embedding_0


def I(
    embedding_norm,  # [256]
    hidden_norm,  # [256]
    projection,  # [256, 512]
    h,  # [256, 256]
    embedding_0,  # [256, 256]
    d_y,  # [256, 256]
):
    """Backward for the inputs: their gradients, then what W will read. _again: what F had, computed again."""
    d_cat2_0 = linear_dgrad(d_y, projection)  # [256, 512]
    rmsnorm_0_again, rmsnorm_0_rstd_again = rmsnorm(embedding_0, embedding_norm, 1e-06)  # [256, 256], [256]
    rmsnorm_1_again, rmsnorm_1_rstd_again = rmsnorm(h, hidden_norm, 1e-06)  # [256, 256], [256]
    cat2_0_again = torch.cat((rmsnorm_0_again, rmsnorm_1_again), dim=-1)  # [256, 512]
    d_rmsnorm_1 = d_cat2_0[:, 256:512]  # [256, 256]
    d_h = rmsnorm_dgrad(d_rmsnorm_1, h, hidden_norm, rmsnorm_1_rstd_again)  # [256, 256]
    d_rmsnorm_0 = d_cat2_0[:, 0:256]  # [256, 256]
    d_embedding_0 = rmsnorm_dgrad(d_rmsnorm_0, embedding_0, embedding_norm, rmsnorm_0_rstd_again)  # [256, 256]
    return d_h, d_cat2_0, rmsnorm_0_rstd_again, rmsnorm_1_rstd_again, cat2_0_again, d_embedding_0


def W(
    g_table,  # [4096, 256]
    g_embedding_norm,  # [256]
    g_hidden_norm,  # [256]
    g_projection,  # [256, 512]
    tokens,  # [256] int64
    h,  # [256, 256]
    embedding_0,  # [256, 256]
    d_y,  # [256, 256]
    d_cat2_0,  # [256, 512]
    rmsnorm_0_rstd_again,  # [256]
    rmsnorm_1_rstd_again,  # [256]
    cat2_0_again,  # [256, 512]
    d_embedding_0,  # [256, 256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_projection, d_y, cat2_0_again)
    d_rmsnorm_1 = d_cat2_0[:, 256:512]  # [256, 256]
    rmsnorm_wgrad_(g_hidden_norm, d_rmsnorm_1, h, rmsnorm_1_rstd_again)
    d_rmsnorm_0 = d_cat2_0[:, 0:256]  # [256, 256]
    rmsnorm_wgrad_(g_embedding_norm, d_rmsnorm_0, embedding_0, rmsnorm_0_rstd_again)
    embedding_wgrad_(g_table, d_embedding_0, tokens)
