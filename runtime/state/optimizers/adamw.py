"""AdamW with decoupled decay, on flat tensors. Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.

Moments may be BF16 with FP32 weights, as in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.3. The
update is then computed in FP32 with the new moments before they are rounded to nearest and stored. A moment that would
change by less than 2⁻⁹ of its value does not change: if 1 − β₂ is below that, the second moment never decays, even when
gradients vanish.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native.library import call, runs_natively
from runtime.ops.product import wide_dtype

BLOCK = 2**16  # elements at a time: 1.5 MiB with temporaries


def adamw(
    master: Tensor,
    gradients: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    rounded: Tensor | None,
    factor: float,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step: int,
) -> None:
    """Update weights and moments with `factor` times the gradients. The C++ op needs both moments FP32 or both BF16."""
    keep, scale, root = 1 - rate * decay, rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
    if runs_natively(master, gradients) and runs_natively(moment1, moment2) and master.dtype == torch.float32:
        tensors, numbers = (master, gradients, moment1, moment2, rounded), (factor, keep, scale, root)
        call("adamw", moment1.dtype, master.numel(), *tensors, *numbers, beta1, 1 - beta1, beta2, 1 - beta2, eps)
        return
    dtype = wide_dtype(master.dtype)
    size = BLOCK if master.is_cpu else max(1, master.numel())
    for weight, gradient, first, second in zip(
        *(tensor.split(size) for tensor in (master, gradients, moment1, moment2)), strict=True
    ):
        g = gradient.to(dtype) * factor
        m1 = first.to(dtype).mul(beta1).add_(g, alpha=1 - beta1)
        m2 = second.to(dtype).mul(beta2).addcmul_(g, g, value=1 - beta2)
        first.copy_(m1)
        second.copy_(m2)
        weight.copy_(weight.to(dtype).mul(keep).addcdiv_(m1, m2.sqrt_().mul_(root).add_(eps), value=-scale))
    if rounded is not None:
        rounded.copy_(master)
