# constructed by dsc: segment mtp_input, T=256 D=192, float32
# from spec.resolved:101: mtp
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

embedding = on_cuda(__file__, 'embedding_d192_float32', embedding)
embedding_wgrad_ = on_cuda(__file__, 'embedding_d192_float32', embedding_wgrad_)
rmsnorm = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm)
rmsnorm_dgrad = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_dgrad)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_wgrad_)


def F(
    table,  # [4096, 192]
    embedding_norm,  # [192]
    hidden_norm,  # [192]
    projection,  # [192, 384]
    tokens,  # [256] int64
    h,  # [256, 192]
):
    """Forward: the outputs, then what the backward will read."""
    embedding_0 = embedding(tokens, table)  # [256, 192]
    rmsnorm_0, rmsnorm_0_rstd = rmsnorm(embedding_0, embedding_norm, 1e-06)  # [256, 192], [256]
    rmsnorm_1, rmsnorm_1_rstd = rmsnorm(h, hidden_norm, 1e-06)  # [256, 192], [256]
    cat2_0 = torch.cat((rmsnorm_0, rmsnorm_1), dim=-1)  # [256, 384]
    y = linear(cat2_0, projection)  # [256, 192]
    return y, embedding_0, rmsnorm_0_rstd, rmsnorm_1_rstd, cat2_0


def I(
    embedding_norm,  # [192]
    hidden_norm,  # [192]
    projection,  # [192, 384]
    h,  # [256, 192]
    embedding_0,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    rmsnorm_1_rstd,  # [256]
    d_y,  # [256, 192]
):
    """Backward for the inputs: their gradients, then what W will read."""
    d_cat2_0 = linear_dgrad(d_y, projection)  # [256, 384]
    d_rmsnorm_1 = d_cat2_0[:, 192:384]  # [256, 192]
    d_h = rmsnorm_dgrad(d_rmsnorm_1, h, hidden_norm, rmsnorm_1_rstd)  # [256, 192]
    d_rmsnorm_0 = d_cat2_0[:, 0:192]  # [256, 192]
    d_embedding_0 = rmsnorm_dgrad(d_rmsnorm_0, embedding_0, embedding_norm, rmsnorm_0_rstd)  # [256, 192]
    return d_h, d_cat2_0, d_embedding_0


def W(
    g_table,  # [4096, 192]
    g_embedding_norm,  # [192]
    g_hidden_norm,  # [192]
    g_projection,  # [192, 384]
    tokens,  # [256] int64
    h,  # [256, 192]
    embedding_0,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    rmsnorm_1_rstd,  # [256]
    cat2_0,  # [256, 384]
    d_y,  # [256, 192]
    d_cat2_0,  # [256, 384]
    d_embedding_0,  # [256, 192]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wgrad_(g_projection, d_y, cat2_0)
    d_rmsnorm_1 = d_cat2_0[:, 192:384]  # [256, 192]
    rmsnorm_wgrad_(g_hidden_norm, d_rmsnorm_1, h, rmsnorm_1_rstd)
    d_rmsnorm_0 = d_cat2_0[:, 0:192]  # [256, 192]
    rmsnorm_wgrad_(g_embedding_norm, d_rmsnorm_0, embedding_0, rmsnorm_0_rstd)
    embedding_wgrad_(g_table, d_embedding_0, tokens)
