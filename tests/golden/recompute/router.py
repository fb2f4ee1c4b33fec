# constructed by dsc: segment router, T=256 D=256, float32
# eps=1e-06 biased=True softmax=False groups=4 top_groups=2 top_k=4 normalize=True scale=2.5 sequence=256 shared=True
# balance=True
# recompute: rmsnorm

import torch

from runtime.build.kernels import on_cuda
from runtime.ops import (
    add_rmsnorm,
    linear_wide,
    linear_wide_dgrad,
    linear_wide_wgrad_,
    permute_gate_dgrad,
    permuted_rmsnorm_again_dgrad_add,
    rmsnorm_wgrad_,
    route_dgrad,
    route_permute,
    sequence_balance,
    sequence_balance_dgrad,
)

add_rmsnorm = on_cuda(__file__, 'rmsnorm_d256_float32', add_rmsnorm)
permute_gate_dgrad = on_cuda(__file__, 'permute_gate_float32', permute_gate_dgrad)
permuted_rmsnorm_again_dgrad_add = on_cuda(__file__, 'norm_gradient_k4_d256_float32', permuted_rmsnorm_again_dgrad_add)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d256_float32', rmsnorm_wgrad_)
route_dgrad = on_cuda(__file__, 'route_dgrad_e16_k4_sigmoid_normalize', route_dgrad)
route_permute = on_cuda(__file__, 'route_permute_e16_g4_2_k4_sigmoid_normalize_d256_float32', route_permute)
sequence_balance = on_cuda(__file__, 'sequence_balance_e16_k4_sigmoid', sequence_balance)
sequence_balance_dgrad = on_cuda(__file__, 'sequence_balance_e16_k4_sigmoid', sequence_balance_dgrad)


def F(
    norm,  # [256]
    weight,  # [16, 256]
    bias,  # [16]
    h,  # [256, 256]
    y,  # [256, 256]
):
    """Forward: the outputs, then what the backward will read."""
    residual, x, rmsnorm_0_rstd = add_rmsnorm(h, y, norm, 1e-06)  # [256, 256], [256, 256], [256]
    linear_wide_0 = linear_wide(x, weight)  # [256, 16]
    route_0_gate, route_0_expert, rows, gate, order, counts = route_permute(
        linear_wide_0, bias, x, None, False, 4, 2, 4, True, 2.5
    )  # [256, 4], [256, 4] int64, [1024, 256], [1024], [1024] int64, [16] int64
    sequence_loss = sequence_balance(linear_wide_0, route_0_expert, 256, False)  # []
    return residual, x, rows, gate, order, counts, sequence_loss, linear_wide_0, route_0_expert


def I(
    norm,  # [256]
    weight,  # [16, 256]
    residual,  # [256, 256]
    order,  # [1024] int64
    linear_wide_0,  # [256, 16]
    route_0_expert,  # [256, 4] int64
    d_residual,  # [256, 256]
    d_x,  # [256, 256]
    d_rows,  # [1024, 256]
    d_gate,  # [1024]
    d_sequence_loss,  # []
):
    """Backward for the inputs: their gradients, then what W will read. _again: what F had, computed again."""
    sequence_balance_dgrad_0 = sequence_balance_dgrad(
        d_sequence_loss, linear_wide_0, route_0_expert, 256, False
    )  # [256, 16]
    d_route_0_gate = permute_gate_dgrad(d_gate, order, 4)  # [256, 4]
    route_dgrad_0 = route_dgrad(d_route_0_gate, linear_wide_0, route_0_expert, False, True, 2.5)  # [256, 16]
    d_linear_wide_0 = torch.add(sequence_balance_dgrad_0, route_dgrad_0)  # [256, 16]
    linear_wide_dgrad_0 = linear_wide_dgrad(d_linear_wide_0, weight)  # [256, 256]
    d_rmsnorm_0, x_again, rmsnorm_0_rstd_again, d_add_0 = permuted_rmsnorm_again_dgrad_add(
        d_rows, order, 4, d_x, linear_wide_dgrad_0, residual, norm, 1e-06, d_residual
    )  # [256, 256], [256, 256], [256], [256, 256]
    return d_add_0, d_add_0, d_linear_wide_0, d_rmsnorm_0, x_again, rmsnorm_0_rstd_again


def W(
    g_norm,  # [256]
    g_weight,  # [16, 256]
    residual,  # [256, 256]
    d_linear_wide_0,  # [256, 16]
    d_rmsnorm_0,  # [256, 256]
    x_again,  # [256, 256]
    rmsnorm_0_rstd_again,  # [256]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wide_wgrad_(g_weight, d_linear_wide_0, x_again)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, residual, rmsnorm_0_rstd_again)
