"""Which of torch's products a weight gradient takes on CUDA, and what of it: on fake tensors, which have no numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.ops.linear import linear_wgrad_

T, N, K = 3, 4, 5


class Calls(TorchDispatchMode):
    """Writes down every operation that changes or makes numbers, and the dtype and shape of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.seen.append((str(func), result.dtype, tuple(result.shape)))
        return result


def products(device: str, dtype: torch.dtype, held: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    with FakeTensorMode():
        acc_NK = torch.empty(N, K, dtype=held, device=device)
        dy_TN, x_TK = (torch.empty(T, width, dtype=dtype, device=device) for width in (N, K))
        with Calls() as calls:
            linear_wgrad_(acc_NK, dy_TN, x_TK)
    return calls.seen


def test_bf16_on_cuda_is_multiplied_into_fp32() -> None:
    """A BF16 product on CUDA goes to the FP32 sum without being rounded on the way."""
    fp32 = (torch.float32, (N, K))
    assert products("cuda", torch.bfloat16, torch.float32) == [("aten.mm.dtype", *fp32), ("aten.add_.Tensor", *fp32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_dtype_is_added_to_in_place(dtype: torch.dtype) -> None:
    assert products("cuda", dtype, dtype) == [("aten.addmm_.default", dtype, (N, K))]
