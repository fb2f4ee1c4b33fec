# constructed by dsc: segment router, T=256 D=192, float32
# from spec.resolved:84: layers 1..3
# eps=1e-06 biased=True softmax=False groups=4 top_groups=2 top_k=4 normalize=True scale=2.5 sequence=128 shared=True
# balance=True

import torch

from runtime.build.kernels import on_cuda
from runtime.ops import (
    add_rmsnorm,
    linear_wide,
    linear_wide_dgrad,
    linear_wide_wgrad_,
    permute_gate_dgrad,
    permuted_rmsnorm_dgrad_add,
    rmsnorm_wgrad_,
    route_dgrad,
    route_permute,
    sequence_balance,
    sequence_balance_dgrad,
)

add_rmsnorm = on_cuda(__file__, 'rmsnorm_d192_float32', add_rmsnorm)
permute_gate_dgrad = on_cuda(__file__, 'permute_gate_float32', permute_gate_dgrad)
permuted_rmsnorm_dgrad_add = on_cuda(__file__, 'norm_gradient_k4_d192_float32', permuted_rmsnorm_dgrad_add)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d192_float32', rmsnorm_wgrad_)
route_dgrad = on_cuda(__file__, 'route_dgrad_e16_k4_sigmoid_normalize', route_dgrad)
route_permute = on_cuda(__file__, 'route_permute_e16_g4_2_k4_sigmoid_normalize_d192_float32', route_permute)
sequence_balance = on_cuda(__file__, 'sequence_balance_e16_k4_sigmoid', sequence_balance)
sequence_balance_dgrad = on_cuda(__file__, 'sequence_balance_e16_k4_sigmoid', sequence_balance_dgrad)


def F(
    norm,  # [192]
    weight,  # [16, 192]
    bias,  # [16]
    h,  # [256, 192]
    y,  # [256, 192]
):
    """Forward: the outputs, then what the backward will read."""
    residual, x, rmsnorm_0_rstd = add_rmsnorm(h, y, norm, 1e-06)  # [256, 192], [256, 192], [256]
    linear_wide_0 = linear_wide(x, weight)  # [256, 16]
    route_0_gate, route_0_expert, rows, gate, order, counts = route_permute(
        linear_wide_0, bias, x, None, False, 4, 2, 4, True, 2.5
    )  # [256, 4], [256, 4] int64, [1024, 192], [1024], [1024] int64, [16] int64
    sequence_loss = sequence_balance(linear_wide_0, route_0_expert, 128, False)  # []
    return residual, x, rows, gate, order, counts, sequence_loss, rmsnorm_0_rstd, linear_wide_0, route_0_expert


def I(
    norm,  # [192]
    weight,  # [16, 192]
    residual,  # [256, 192]
    order,  # [1024] int64
    rmsnorm_0_rstd,  # [256]
    linear_wide_0,  # [256, 16]
    route_0_expert,  # [256, 4] int64
    d_residual,  # [256, 192]
    d_x,  # [256, 192]
    d_rows,  # [1024, 192]
    d_gate,  # [1024]
    d_sequence_loss,  # []
):
    """Backward for the inputs: their gradients, then what W will read."""
    sequence_balance_dgrad_0 = sequence_balance_dgrad(
        d_sequence_loss, linear_wide_0, route_0_expert, 128, False
    )  # [256, 16]
    d_route_0_gate = permute_gate_dgrad(d_gate, order, 4)  # [256, 4]
    route_dgrad_0 = route_dgrad(d_route_0_gate, linear_wide_0, route_0_expert, False, True, 2.5)  # [256, 16]
    d_linear_wide_0 = torch.add(sequence_balance_dgrad_0, route_dgrad_0)  # [256, 16]
    linear_wide_dgrad_0 = linear_wide_dgrad(d_linear_wide_0, weight)  # [256, 192]
    d_rmsnorm_0, d_add_0 = permuted_rmsnorm_dgrad_add(
        d_rows, order, 4, d_x, linear_wide_dgrad_0, residual, norm, rmsnorm_0_rstd, d_residual
    )  # [256, 192], [256, 192]
    return d_add_0, d_add_0, d_linear_wide_0, d_rmsnorm_0


def W(
    g_norm,  # [192]
    g_weight,  # [16, 192]
    residual,  # [256, 192]
    x,  # [256, 192]
    rmsnorm_0_rstd,  # [256]
    d_linear_wide_0,  # [256, 16]
    d_rmsnorm_0,  # [256, 192]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wide_wgrad_(g_weight, d_linear_wide_0, x)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, residual, rmsnorm_0_rstd)
