"""BF16 operands: what an op computes with them, and what it keeps wider.

Products of matrices read BF16, add up in FP32 and are rounded once. Every other op computes in FP32 and rounds each of
its results once. Statistics (of norms, of a softmax), losses, router scores and gate weights, and all that is added to
over time (gradients of weights, in FP32 buffers) are never BF16. So a result is off by half a unit in its last place,
2⁻⁸ of it, beside what FP32 leaves. In FP32 and FP64 nothing here does anything.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes with operands of `dtype`: FP32 at least."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def wide(x: Tensor) -> Tensor:
    """x in that dtype; x itself where it has it."""
    return x.to(wide_dtype(x.dtype))
