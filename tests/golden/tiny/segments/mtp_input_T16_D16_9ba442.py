# constructed by dsc: segment mtp_input, T=16 D=16, float32
# from spec.resolved:89: mtp
# eps=1e-06

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

embedding = on_cuda(__file__, 'embedding_d16_float32', embedding)
embedding_wgrad_ = on_cuda(__file__, 'embedding_d16_float32', embedding_wgrad_)
rmsnorm = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_wgrad_)


def F(
    table,  # [512, 16]
    embedding_norm,  # [16]
    hidden_norm,  # [16]
    projection,  # [16, 32]
    tokens,  # [16] int64
    h,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    embedding_0 = embedding(tokens, table)  # [16, 16]
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm(embedding_0, embedding_norm, 1e-06)  # [16, 16], [16]
    rmsnorm_1, rmsnorm_1_rstd = rmsnorm(h, hidden_norm, 1e-06)  # [16, 16], [16]
    cat2_0 = torch.cat((rmsnorm_0, rmsnorm_1), dim=-1)  # [16, 32]
    y = linear(cat2_0, projection)  # [16, 16]
    return y, embedding_0, rmsnorm_0_rstd, rmsnorm_1_rstd, cat2_0


def I(
    embedding_norm,  # [16]
    hidden_norm,  # [16]
    projection,  # [16, 32]
    h,  # [16, 16]
    embedding_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    rmsnorm_1_rstd,  # [16]
    d_y,  # [16, 16]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_cat2_0 = linear_dgrad(d_y, projection)  # [16, 32]
    d_rmsnorm_1 = d_cat2_0[:, 16:32]  # [16, 16]
    d_h = rmsnorm_dgrad(d_rmsnorm_1, h, hidden_norm, rmsnorm_1_rstd)  # [16, 16]
    d_rmsnorm_0 = d_cat2_0[:, 0:16]  # [16, 16]
    d_embedding_0 = rmsnorm_dgrad(d_rmsnorm_0, embedding_0, embedding_norm, rmsnorm_0_rstd)  # [16, 16]
    return d_h, d_cat2_0, d_embedding_0


def W(
    g_table,  # [512, 16]
    g_embedding_norm,  # [16]
    g_hidden_norm,  # [16]
    g_projection,  # [16, 32]
    tokens,  # [16] int64
    h,  # [16, 16]
    embedding_0,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    rmsnorm_1_rstd,  # [16]
    cat2_0,  # [16, 32]
    d_y,  # [16, 16]
    d_cat2_0,  # [16, 32]
    d_embedding_0,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_projection, d_y, cat2_0)
    d_rmsnorm_1 = d_cat2_0[:, 16:32]  # [16, 16]
    rmsnorm_wgrad_(g_hidden_norm, d_rmsnorm_1, h, rmsnorm_1_rstd)
    d_rmsnorm_0 = d_cat2_0[:, 0:16]  # [16, 16]
    rmsnorm_wgrad_(g_embedding_norm, d_rmsnorm_0, embedding_0, rmsnorm_0_rstd)
    embedding_wgrad_(g_table, d_embedding_0, tokens)
