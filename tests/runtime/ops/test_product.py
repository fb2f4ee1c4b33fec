"""Which of torch's products a weight gradient uses on CUDA, and its operands: on fake tensors, without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.ops import product
from runtime.ops.linear import linear_wgrad_, linear_wide, linear_wide_dgrad, linear_wide_wgrad_

T, N, K = 3, 4, 5


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation. Without CUDA, fake tensors have no `out` variant of this one, so it is not called."""
    return kwargs["out"] if func is torch.ops.aten.addmm.dtype_out else func(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Records every operation that computes or changes numbers, with the dtype and shape of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = called(func, args, kwargs)
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


@pytest.mark.parametrize("takes", [True, False])
def test_bf16_on_cuda_is_multiplied_into_fp32(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    """A BF16 product on CUDA is added to the FP32 sum without rounding in between; in one pass if torch can."""
    monkeypatch.setattr(product, "takes_wide_summand", lambda: takes)
    fp32 = (torch.float32, (N, K))
    passes = [("aten.mm.dtype", *fp32), ("aten.add_.Tensor", *fp32)]
    assert products("cuda", torch.bfloat16, torch.float32) == ([("aten.addmm.dtype_out", *fp32)] if takes else passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_dtype_is_added_to_in_place(dtype: torch.dtype) -> None:
    assert products("cuda", dtype, dtype) == [("aten.addmm_.default", dtype, (N, K))]


def wide_products(device: str) -> list[tuple[str, torch.dtype]]:
    """The products of a BF16 router, forward and backward, with the dtypes of their operands."""
    records = []

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = called(func, args, kwargs)
            if "mm" in str(func):
                assert result.dtype == torch.float32, func
                records.append((str(func), args[1].dtype))
            return result

    with FakeTensorMode(), Operands():
        x_TK, w_NK = (torch.empty(rows, K, dtype=torch.bfloat16, device=device) for rows in (T, N))
        acc_NK = torch.empty(N, K, device=device)
        dy_TN = linear_wide(x_TK, w_NK)
        assert dy_TN.dtype == torch.float32 and dy_TN.shape == (T, N)
        dx_TK = linear_wide_dgrad(dy_TN, w_NK)
        assert dx_TK.dtype == torch.bfloat16 and dx_TK.shape == (T, K)
        linear_wide_wgrad_(acc_NK, dy_TN, x_TK)
    return records


def test_a_router_of_bf16_multiplies_on_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "takes_wide_summand", lambda: True)
    bf16 = torch.bfloat16
    mm, addmm = ("aten.mm.dtype", bf16), ("aten.addmm.dtype_out", bf16)
    assert wide_products("cuda") == [mm, mm, addmm, addmm, addmm]


def test_three_parts_are_the_whole() -> None:
    """Products of the parts, summed without rounding, are the products of the FP32 numbers."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, 1.0, 2.0**-109, 1.99999988 * 2.0**126, -(2.0**127), 0.1, 1 / 3])
    x = torch.cat([edges, bits.view(torch.float32)])
    x = x[torch.isfinite(x) & ((x == 0) | (x.abs() >= 2.0**-109)) & (x.abs() <= 2.0**127)]
    parts = product.bf16_parts(x)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), x.double())
