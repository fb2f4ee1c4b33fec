"""AdamW with decoupled decay, of flat tensors. Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017.

Moments may be BF16 beside FP32 weights, as DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.3. Then the
update is computed in FP32 from what they hold, with the new moments as they are before they are rounded, to nearest, to
be kept. A moment that would change by less than 2⁻⁹ of itself stays where it is: the second one does not decay where
1 − β₂ is below that, and with gradients that come to nothing keeps its value for good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.ops.native.library import call, takes
from runtime.ops.product import wide_dtype

BLOCK = 2**16  # elements at a time: 1.5 MiB with all that is made on the way


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
    """Update weights and moments by `factor` times the gradients. In C++ the moments are both FP32 or both BF16."""
    keep, scale, root = 1 - rate * decay, rate / (1 - beta1**step), (1 - beta2**step) ** -0.5
    if takes(master, gradients) and takes(moment1, moment2) and master.dtype == torch.float32:
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
