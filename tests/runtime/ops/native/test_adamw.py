"""AdamW in C++ against its formula in float64, and its rounding of parameters and moments to BF16."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.ops.native.library import call
from runtime.state.optimizers.adamw import adamw
from tests.runtime.ops.cases import Source
from tests.runtime.ops.native.bounds import SECOND, U
from tests.runtime.ops.native.guarded import fenced_call

pytestmark = pytest.mark.usefixtures("instructions")
moments = pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
some = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
MODULE = sys.modules["runtime.state.optimizers.adamw"]
RATE, BETA1, BETA2, EPS = 1e-2, 0.9, 0.95, 1e-8


def state(n: int, seed: int, moments: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters, gradients and moments in the middle of a run."""
    source = Source(torch.float32, seed)
    parameters, gradients, first, second = (source.normal(n) for _ in range(4))
    return [parameters, gradients, (0.1 * first).to(moments), second.square().to(moments)]


@some
@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(0.01, 1), st.sampled_from([0.0, 0.1]), st.integers(1, 500))
def test_a_step(seed: int, n: int, factor: float, decay: float, step: int) -> None:
    tensors = state(n, seed)
    p, g, m1, m2 = (x.double() for x in tensors)
    rounded = torch.empty(n, dtype=torch.bfloat16)
    adamw(*tensors, rounded, factor, RATE, BETA1, BETA2, EPS, decay, step)
    terms1 = (BETA1 * m1).abs() + ((1 - BETA1) * factor * g).abs()
    m1, m2 = BETA1 * m1 + (1 - BETA1) * factor * g, BETA2 * m2 + (1 - BETA2) * (factor * g) ** 2
    scale = RATE / (1 - BETA1**step) / ((m2 / (1 - BETA2**step)).sqrt() + EPS)
    decayed = p * (1 - RATE * decay)
    off = (4 * U * decayed.abs() + scale * U * (6 * terms1 + 16 * m1.abs()), 0 * g, 6 * U * terms1, 10 * U * m2)
    for tensor, exact, bound in zip(tensors, (decayed - scale * m1, g, m1, m2), off, strict=True):
        exact = exact.double() if tensor is tensors[1] else exact
        assert ((tensor.double() - exact).abs() <= SECOND * bound).all()
    assert torch.equal(rounded, tensors[0].bfloat16())


@some
@given(st.integers(0, 2**31), st.integers(0, 200), st.floats(0.01, 1), st.sampled_from([0.0, 0.1]), st.integers(1, 500))
def test_bf16_moments_are_fp32_ones_rounded_by_torch(seed: int, n: int, factor: float, decay: float, step: int) -> None:
    """BF16 moments equal rounded FP32 moments that start from the same BF16 values; weights use them unrounded."""
    short = state(n, seed, torch.bfloat16)
    wide = [x.float().clone() for x in short]
    copies = [torch.empty(n, dtype=torch.bfloat16) for _ in range(2)]
    for tensors, rounded in zip((short, wide), copies, strict=True):
        adamw(*tensors, rounded, factor, RATE, BETA1, BETA2, EPS, decay, step)
    for narrow, exact in zip((*short, copies[0]), (*wide, copies[1]), strict=True):
        assert torch.equal(narrow, exact.to(narrow.dtype))


def test_the_op_uses_the_cpp_for_moments_of_both_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ op runs for moments of either dtype; torch runs if the two differ or weights are not FP32."""
    called: list[torch.dtype] = []

    def counting(name: str, dtype: torch.dtype, *args: Any) -> None:
        called.append(dtype)
        call(name, dtype, *args)

    monkeypatch.setattr(MODULE, "call", counting)
    for dtype in (torch.float32, torch.bfloat16):
        adamw(*state(9, 0, dtype), None, 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    assert called == [torch.float32, torch.bfloat16]
    p, g, m1, m2 = state(9, 0)
    for operands in ((p, g, m1.bfloat16(), m2), (p, g.bfloat16(), m1, m2), [x.bfloat16() for x in (p, g, m1, m2)]):
        adamw(*operands, None, 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    assert len(called) == 2


def numbers() -> Tensor:
    """FP32 numbers of every kind, including NaN, infinities, denormals and ties of rounding to BF16."""
    high = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32) << 16
    return torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Assert that numbers are rounded to BF16 as by torch: ties to even, and NaN stays NaN, whatever its bits."""
    wanted = exact.bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    usual = ~wanted.isnan()
    assert torch.equal(found[usual].view(torch.int16), wanted[usual].view(torch.int16))


def test_rounding_of_moments_is_torchs_for_every_kind_of_number() -> None:
    """With beta1 = 0, a first moment of 0 becomes the gradient; with beta2 = 0, a second one becomes its square."""
    values = numbers()
    zeros = torch.zeros_like(values)
    first, second = (torch.zeros_like(values, dtype=torch.bfloat16) for _ in range(2))
    adamw(zeros.clone(), values, first, second, None, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1)
    assert_rounded(first, values + 0.0)  # 0 · 0 + −0 is 0
    assert_rounded(second, values.square())


def test_rounding_is_torchs_for_every_kind_of_number() -> None:
    """The update of the parameters is zero here."""
    values = numbers()
    zeros, rounded = torch.zeros_like(values), torch.empty_like(values, dtype=torch.bfloat16)
    adamw(values, zeros, zeros.clone(), zeros.clone(), rounded, 1.0, 0.0, BETA1, BETA2, 1.0, 0.0, 1)
    assert_rounded(rounded, values)


@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 100])
@pytest.mark.parametrize("at_end", [True, False])
@moments
def test_accesses_only_its_operands(
    moments: torch.dtype, n: int, at_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, rounded = state(n, 0, moments), torch.empty(n, dtype=torch.bfloat16)
    adamw(*wanted, rounded, 0.5, RATE, BETA1, BETA2, EPS, 0.1, 3)
    monkeypatch.setattr(MODULE, "call", partial(fenced_call, at_end))
    tensors, again = state(n, 0, moments), torch.empty(n, dtype=torch.bfloat16)
    adamw(*tensors, again, 0.5, RATE, BETA1, BETA2, EPS, 0.1, 3)
    assert all(
        torch.equal(tensor, expected) for tensor, expected in zip((*tensors, again), (*wanted, rounded), strict=True)
    )


@moments
def test_without_a_copy_in_bf16(moments: torch.dtype) -> None:
    with_one, without = state(33, 1, moments), state(33, 1, moments)
    adamw(*with_one, torch.empty(33, dtype=torch.bfloat16), 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    adamw(*without, None, 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    assert all(torch.equal(left, right) for left, right in zip(with_one, without, strict=True))
