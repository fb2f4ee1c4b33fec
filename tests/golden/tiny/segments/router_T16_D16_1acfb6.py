# constructed by dsc: segment router, T=16 D=16, float32
# from spec.resolved:72: layers 1..1
# eps=1e-06 biased=True softmax=False groups=2 top_groups=1 top_k=2 normalize=True scale=2.5 sequence=16 shared=True
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

add_rmsnorm = on_cuda(__file__, 'rmsnorm_d16_float32', add_rmsnorm)
permute_gate_dgrad = on_cuda(__file__, 'permute_gate_float32', permute_gate_dgrad)
permuted_rmsnorm_dgrad_add = on_cuda(__file__, 'norm_gradient_k2_d16_float32', permuted_rmsnorm_dgrad_add)
rmsnorm_wgrad_ = on_cuda(__file__, 'rmsnorm_d16_float32', rmsnorm_wgrad_)
route_dgrad = on_cuda(__file__, 'route_dgrad_e4_k2_sigmoid_normalize', route_dgrad)
route_permute = on_cuda(__file__, 'route_permute_e4_g2_1_k2_sigmoid_normalize_d16_float32', route_permute)
sequence_balance = on_cuda(__file__, 'sequence_balance_e4_k2_sigmoid', sequence_balance)
sequence_balance_dgrad = on_cuda(__file__, 'sequence_balance_e4_k2_sigmoid', sequence_balance_dgrad)


def F(
    norm,  # [16]
    weight,  # [4, 16]
    bias,  # [4]
    h,  # [16, 16]
    y,  # [16, 16]
):
    """Forward: the outputs, then what the backward will read."""
    residual, x, rmsnorm_0_rstd = add_rmsnorm(h, y, norm, 1e-06)  # [16, 16], [16, 16], [16]
    linear_wide_0 = linear_wide(x, weight)  # [16, 4]
    route_0_gate, route_0_expert, rows, gate, order, counts = route_permute(
        linear_wide_0, bias, x, None, False, 2, 1, 2, True, 2.5
    )  # [16, 2], [16, 2] int64, [32, 16], [32], [32] int64, [4] int64
    sequence_loss = sequence_balance(linear_wide_0, route_0_expert, 16, False)  # []
    return residual, x, rows, gate, order, counts, sequence_loss, rmsnorm_0_rstd, linear_wide_0, route_0_expert


def I(
    norm,  # [16]
    weight,  # [4, 16]
    residual,  # [16, 16]
    order,  # [32] int64
    rmsnorm_0_rstd,  # [16]
    linear_wide_0,  # [16, 4]
    route_0_expert,  # [16, 2] int64
    d_residual,  # [16, 16]
    d_x,  # [16, 16]
    d_rows,  # [32, 16]
    d_gate,  # [32]
    d_sequence_loss,  # []
):
    """Backward for the inputs: their gradients, then what W will read."""
    sequence_balance_dgrad_0 = sequence_balance_dgrad(
        d_sequence_loss, linear_wide_0, route_0_expert, 16, False
    )  # [16, 4]
    d_route_0_gate = permute_gate_dgrad(d_gate, order, 2)  # [16, 2]
    route_dgrad_0 = route_dgrad(d_route_0_gate, linear_wide_0, route_0_expert, False, True, 2.5)  # [16, 4]
    d_linear_wide_0 = torch.add(sequence_balance_dgrad_0, route_dgrad_0)  # [16, 4]
    linear_wide_dgrad_0 = linear_wide_dgrad(d_linear_wide_0, weight)  # [16, 16]
    d_rmsnorm_0, d_add_0 = permuted_rmsnorm_dgrad_add(
        d_rows, order, 2, d_x, linear_wide_dgrad_0, residual, norm, rmsnorm_0_rstd, d_residual
    )  # [16, 16], [16, 16]
    return d_add_0, d_add_0, d_linear_wide_0, d_rmsnorm_0


def W(
    g_norm,  # [16]
    g_weight,  # [4, 16]
    residual,  # [16, 16]
    x,  # [16, 16]
    rmsnorm_0_rstd,  # [16]
    d_linear_wide_0,  # [16, 4]
    d_rmsnorm_0,  # [16, 16]
):
    """Backward for the weights: adds to the gradients in the g_ buffers."""
    linear_wide_wgrad_(g_weight, d_linear_wide_0, x)
    rmsnorm_wgrad_(g_norm, d_rmsnorm_0, residual, rmsnorm_0_rstd)
