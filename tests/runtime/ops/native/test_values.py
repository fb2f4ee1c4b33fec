"""e^x at every magnitude, and NaN and infinities, which give the results of torch's ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.ops import OPS
from tests.runtime.ops import cases
from tests.runtime.ops.cases import FORWARD, Source, as_tuple, gradient_arguments

NAN, INF = torch.nan, torch.inf
pytestmark = pytest.mark.usefixtures("instructions")


def exp(x: Tensor) -> Tensor:
    """e^x in C++: the gradient of the cross entropy of logits with lse 0, outside the target's column."""
    logits_TV = torch.cat((torch.zeros(1), x))[None]
    tangent, target, lse_T = torch.ones(()), torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    return OPS["cross_entropy_dgrad"](tangent, logits_TV, target, lse_T)[0, 1:]


def test_exp_at_every_magnitude() -> None:
    """Every 2,048th FP32 number, including denormals and numbers near the limits of the result."""
    x = np.arange(0, 2**32, 2**11, dtype=np.uint64).astype(np.uint32).view(np.float32)
    limits = [np.float32(limit) for limit in (-87.3, -87.34, 88.7, 88.72283, 88.72284, 89.0, -103.97, -104.0)]
    near = [np.nextafter(limit, np.float32(way)) for limit in limits for way in (-1e9, 1e9)]
    x = np.concatenate((x[np.isfinite(x)], np.array([*limits, *near], np.float32)))
    with np.errstate(over="ignore", under="ignore"):
        exact, results = np.exp(x.astype(np.float64)), exp(torch.from_numpy(x)).numpy().astype(np.float64)
        stored = exact.astype(np.float32)
    assert (results[stored == np.inf] == np.inf).all()
    assert (results[x <= -104] == 0).all()
    finite = np.isfinite(stored)
    with np.errstate(over="ignore", invalid="ignore"):
        places = (np.abs(results - exact) / np.spacing(stored).astype(np.float64))[finite]
    assert places.max() <= 1
    assert results[x == 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("width", [1, 15, 16, 17])
def test_exp_of_nan_and_infinity(width: int) -> None:
    """exp of NaN and infinities is right in whole vectors and in the remainder of a row."""
    assert exp(torch.full((width,), NAN)).isnan().all()
    assert (exp(torch.full((width,), -INF)) == 0).all()
    assert (exp(torch.full((width,), INF)) == INF).all()


def by_torch(op: str, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    with monkeypatch.context() as patch:
        patch.setattr("runtime.ops.native.library._functions", dict)
        return as_tuple(OPS[op](*args))


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Assert that NaN and infinities are in the same places, and numbers are close."""
    for result, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            result, expected, rtol=2.0**-6 if result.dtype == torch.bfloat16 else 1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, -1e30, 100.0, -100.0, 1e-40])
@pytest.mark.parametrize("op", ["cross_entropy", "gated_swiglu", "rmsnorm", "swiglu"])
def test_rows_with_extreme_values(op: str, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN or infinity is put into one element, then into a row, of each operand of every op and its gradients."""
    width = {"rmsnorm": {"D": 37}, "cross_entropy": {"V": 37}}.get(op, {"I": 37})
    source = Source(dtype, 3)
    for name, args in (
        (op, FORWARD[op](source, **width)),
        *gradient_arguments(op, FORWARD[op](source, **width), source),
    ):
        args = tuple(x.float() if i and name.startswith("gated") and x.dim() == 1 else x for i, x in enumerate(args))
        for index, arg in enumerate(args):
            if not isinstance(arg, Tensor) or not arg.is_floating_point() or arg.dim() == 0:
                continue
            for place in (..., (1, ...), (1, -1), (4, 3))[: 4 if arg.dim() == 2 else 1]:
                changed = arg.clone()
                changed[place] = value
                operands = (*args[:index], changed, *args[index + 1 :])
                same(as_tuple(OPS[name](*operands)), by_torch(name, operands, monkeypatch))


def test_no_valid_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV = Source(torch.float32, 0).normal(5, 19)
    logits_TV[2] = NAN
    void_T = torch.full((5,), -1)
    loss, lse_T = OPS["cross_entropy"](logits_TV, void_T)
    assert loss == 0 and lse_T.isnan().tolist() == [False, False, True, False, False]
    operands = (torch.ones(()), logits_TV, void_T, lse_T)
    dlogits_TV = OPS["cross_entropy_dgrad"](*operands)
    assert (dlogits_TV[[0, 1, 3, 4]] == 0).all()
    same((dlogits_TV,), by_torch("cross_entropy_dgrad", operands, monkeypatch))


@pytest.mark.parametrize("target", [19, 2**40, 2**62])
def test_a_target_outside_the_columns_is_never_read(target: int) -> None:
    """Torch refuses it; here nothing beyond the row is read or written, and the loss is NaN."""
    logits_TV, targets_T = Source(torch.float32, 0).normal(3, 19), torch.tensor([1, target, 2])
    loss, lse_T = OPS["cross_entropy"](logits_TV, targets_T)
    assert loss.isnan() and lse_T.isfinite().all()
    dlogits_TV = OPS["cross_entropy_dgrad"](torch.ones(()), logits_TV, targets_T, lse_T)
    assert dlogits_TV[1].isnan().all() and dlogits_TV[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("op", ["mla_attention", "gqa_attention"])
def test_attention_spreads_nan_only_to_dependent_rows(op: str, index: int, dtype: torch.dtype, value: float) -> None:
    """A NaN reaches later rows of its sequence, but no other sequence and no earlier block of rows."""
    S, bad_row, last = 70, 40, 2
    case = {"mla_attention": cases.mla_attention, "gqa_attention": cases.gqa_attention}[op]
    args = case(Source(dtype, 0), 3, S)
    clean = as_tuple(OPS[op](*args))
    args[index][S + bad_row, -1] = value
    outputs = as_tuple(OPS[op](*args))
    bad = ~outputs[0].isfinite().all(1)
    assert torch.equal(outputs[0][: S + 32], clean[0][: S + 32]) and torch.equal(outputs[0][2 * S :], clean[0][2 * S :])
    if index == 0:
        assert bad.nonzero().tolist() == [[S + bad_row]]
    elif torch.tensor(value).isnan() or (index == last and op == "gqa_attention"):
        assert bad[S + bad_row : 2 * S].all()
    ((name, operands),) = gradient_arguments(op, args, Source(dtype, 1))
    gradients = as_tuple(OPS[name](*operands))
    assert all(gradient[:S].isfinite().all() and gradient[2 * S :].isfinite().all() for gradient in gradients)
    assert not bad.any() or any(not gradient[S : 2 * S].isfinite().all() for gradient in gradients)


def test_scores_of_very_different_size() -> None:
    """Softmax picks the largest score, and nothing overflows."""
    q, kv, k_rope, S, H, *sizes = cases.mla_attention(Source(torch.float32, 0), 1, 40, 1, 16, 2, 4)
    o, lse = OPS["mla_attention"](q * 1e15, kv, k_rope * 1e15, S, H, *sizes)
    assert o.isfinite().all() and lse.isfinite().all() and lse.abs().max() > 1e15
    torch.testing.assert_close(o[0], kv[0, 16:])
