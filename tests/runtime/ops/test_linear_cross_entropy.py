"""A linear layer fused with cross entropy: the results of the unfused ops, without all logits at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import ops
from runtime.ops.native.library import multiplies_natively
from tests.runtime.ops import references
from tests.runtime.ops.cases import Source, as_tuple

MODULE = sys.modules["runtime.ops.linear_cross_entropy"]  # the package exports a function of this name
OPS = ops.OPS
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
Sizes = tuple[int, int, int, int]
Run = Callable[..., tuple[Tensor, ...]]
SIZES: list[Sizes] = [  # T, V, D, logits of a block
    (0, 7, 4, 64),
    (1, 1, 1, 1),
    (130, 65, 33, 1),  # blocks of 64 rows, and of 64 columns: the last have two rows and one column
    (300, 1000, 96, 2**16),
    (77, 640, 513, 2**30),
]


def arguments(dtype: torch.dtype, T: int, V: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dloss, h_TD, w_VD, targets_T."""
    source = Source(dtype, seed=T)
    targets_T = source.below(V, T)
    targets_T[1::3] = -1
    return torch.tensor(0.37, dtype=ops_dtype(dtype)), source.normal(T, D), source.normal(V, D), targets_T


def ops_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def composed(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, acc_VD: Tensor) -> tuple[Tensor, ...]:
    """loss, lse, dh, dw and the accumulator of the unfused ops."""
    logits_TV = OPS["linear"](h_TD, w_VD)
    loss, lse_T = OPS["cross_entropy"](logits_TV, targets_T)
    dlogits_TV = OPS["cross_entropy_dgrad"](dloss, logits_TV, targets_T, lse_T)
    OPS["linear_wgrad_"](acc_VD, dlogits_TV, h_TD)
    return loss, lse_T, OPS["linear_dgrad"](dlogits_TV, w_VD), OPS["linear_wgrad"](dlogits_TV, h_TD), acc_VD


def composed_part(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, acc_VD: Tensor) -> tuple[Tensor, ...]:
    """lse, the logit of each target, and the gradients of `composed`, for one shard of the vocabulary."""
    logits_TV = OPS["linear"](h_TD, w_VD)
    lse_T, picked_T = OPS["cross_entropy_part"](logits_TV, targets_T)
    dlogits_TV = OPS["cross_entropy_part_dgrad"](*tangents(dloss, lse_T), logits_TV, targets_T, lse_T)
    OPS["linear_wgrad_"](acc_VD, dlogits_TV, h_TD)
    return lse_T, picked_T, OPS["linear_dgrad"](dlogits_TV, w_VD), OPS["linear_wgrad"](dlogits_TV, h_TD), acc_VD


def fused_part(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, acc_VD: Tensor) -> tuple[Tensor, ...]:
    lse_T, picked_T = OPS["linear_cross_entropy_part"](h_TD, w_VD, targets_T)
    operands = (*tangents(dloss, lse_T), h_TD, w_VD, targets_T, lse_T)
    assert OPS["linear_cross_entropy_part_wgrad_"](acc_VD, *operands) is None
    gradients = (OPS[f"linear_cross_entropy_part_{gradient}"](*operands) for gradient in ("dgrad", "wgrad"))
    return lse_T, picked_T, *gradients, acc_VD


def tangents(dloss: Tensor, lse_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of lse and of the logit of the target, different in each row."""
    return dloss * lse_T.sigmoid(), dloss * lse_T.cos()


def fused(dloss: Tensor, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, acc_VD: Tensor) -> tuple[Tensor, ...]:
    loss, lse_T = OPS["linear_cross_entropy"](h_TD, w_VD, targets_T)
    operands = (dloss, h_TD, w_VD, targets_T, lse_T)
    assert OPS["linear_cross_entropy_wgrad_"](acc_VD, *operands) is None
    return loss, lse_T, *(OPS[f"linear_cross_entropy_{gradient}"](*operands) for gradient in ("dgrad", "wgrad")), acc_VD


def as_exact(found: Tensor, expected: Tensor, args: tuple[Tensor, ...], extent: int) -> None:
    """Assert equal bits if products are in C++, else equality within reordered sums of `extent` products."""
    unit = 0.0 if multiplies_natively(args[1], args[2]) else torch.finfo(args[1].dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * unit, atol=8 * unit * extent**0.5, equal_nan=True)


@pytest.mark.parametrize(("fused", "composed"), [(fused, composed), (fused_part, composed_part)], ids=["all", "part"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_unfused_ops(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, sizes: Sizes, fused: Run, composed: Run
) -> None:
    """The fused op is bit-identical to the ops if products are in C++; else equal within the error of torch's sums."""
    *extents, block = sizes
    monkeypatch.setattr(MODULE, "BLOCK", block)
    args = arguments(dtype, *extents)
    acc_VD = Source(ops_dtype(dtype), seed=9).normal(*args[2].shape)
    before = [arg.clone() for arg in args]
    results, expected = fused(*args, acc_VD.clone()), composed(*args, acc_VD.clone())
    for result, wanted in zip(results, expected, strict=True):
        assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape) and result.is_contiguous()
        as_exact(result, wanted, args, max(extents))
    assert all(torch.equal(arg, copy) for arg, copy in zip(args, before, strict=True))
    assert all(torch.equal(again, result) for again, result in zip(fused(*args, acc_VD.clone()), results, strict=True))


def test_equals_the_derivative_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "BLOCK", 1)
    dloss, h_TD, w_VD, targets_T = arguments(torch.float64, 150, 90, 12)
    leaves = h_TD.clone().requires_grad_(), w_VD.clone().requires_grad_()
    loss = references.cross_entropy(references.linear(*leaves), targets_T)
    expected = (loss, *torch.autograd.grad(loss, leaves, dloss))
    found_loss, _, dh_TD, dw_VD, _ = fused(dloss, h_TD, w_VD, targets_T, torch.zeros_like(w_VD))
    for result, wanted in zip((found_loss, dh_TD, dw_VD), expected, strict=True):
        torch.testing.assert_close(result, wanted.detach(), rtol=1e-12, atol=1e-12)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [part.numel() for part in as_tuple(result) if isinstance(part, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tensor_holds_all_logits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    T, V, D = 1024, 2048, 32
    monkeypatch.setattr(MODULE, "BLOCK", 2**18)
    args = arguments(dtype, T, V, D)
    with Largest() as largest:
        fused(*args, torch.zeros(V, D, dtype=ops_dtype(dtype)))
    assert 2**18 <= largest.elements <= 2**18 + T  # plus a column for the targets of other blocks
    with Largest() as largest:
        composed(*args, torch.zeros(V, D, dtype=ops_dtype(dtype)))
    assert largest.elements == T * V


def test_nan_and_infinity_equal_those_of_the_unfused_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target outside the columns, for which the C++ makes the loss and its row's gradient NaN; a row of infinity."""
    monkeypatch.setattr(MODULE, "BLOCK", 1)
    dloss, h_TD, w_VD, targets_T = arguments(torch.float32, 150, 90, 12)
    h_TD[70], targets_T[70] = torch.inf, 3
    if multiplies_natively(h_TD, w_VD):
        targets_T[5] = 90
    results, expected = (run(dloss, h_TD, w_VD, targets_T, torch.zeros_like(w_VD)) for run in (fused, composed))
    for result, wanted in zip(results, expected, strict=True):
        as_exact(result, wanted, (dloss, h_TD, w_VD), 150)
    assert results[0].isnan() and results[2][70].isnan().all() and results[2][71:].isfinite().all()
