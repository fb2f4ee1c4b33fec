"""AdamW in C++ against its formula in float64, and how it rounds parameters to BF16."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.native import ops
from tests.native.bounds import SECOND, U
from tests.native.guarded import fenced_call
from tests.ops.cases import Source

pytestmark = pytest.mark.usefixtures("instructions")
some = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
RATE, BETA1, BETA2, EPS = 1e-2, 0.9, 0.95, 1e-8


def state(n: int, seed: int) -> list[Tensor]:
    """Parameters, gradients and moments of a run that goes on."""
    source = Source(torch.float32, seed)
    return [source.normal(n), source.normal(n), source.normal(n) * 0.1, source.normal(n).square()]


@some
@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(0.01, 1), st.sampled_from([0.0, 0.1]), st.integers(1, 500))
def test_a_step(seed: int, n: int, factor: float, decay: float, step: int) -> None:
    found = state(n, seed)
    p, g, m1, m2 = (x.double() for x in found)
    rounded = torch.empty(n, dtype=torch.bfloat16)
    ops.adamw(*found, rounded, factor, RATE, BETA1, BETA2, EPS, decay, step)
    terms1 = (BETA1 * m1).abs() + ((1 - BETA1) * factor * g).abs()
    m1, m2 = BETA1 * m1 + (1 - BETA1) * factor * g, BETA2 * m2 + (1 - BETA2) * (factor * g) ** 2
    scale = RATE / (1 - BETA1**step) / ((m2 / (1 - BETA2**step)).sqrt() + EPS)
    kept = p * (1 - RATE * decay)
    off = (4 * U * kept.abs() + scale * U * (6 * terms1 + 16 * m1.abs()), 0 * g, 6 * U * terms1, 10 * U * m2)
    for one, exact, bound in zip(found, (kept - scale * m1, g, m1, m2), off, strict=True):
        exact = exact.double() if one is found[1] else exact
        assert ((one.double() - exact).abs() <= SECOND * bound).all()
    assert torch.equal(rounded, found[0].bfloat16())


def test_rounding_is_torchs_for_every_kind_of_number() -> None:
    """Nothing is added to the parameters here. Ties go to even; NaN stays NaN, whatever its bits."""
    high = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32) << 16
    numbers = torch.cat([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)
    zeros, rounded = torch.zeros_like(numbers), torch.empty_like(numbers, dtype=torch.bfloat16)
    ops.adamw(numbers, zeros, zeros.clone(), zeros.clone(), rounded, 1.0, 0.0, BETA1, BETA2, 1.0, 0.0, 1)
    wanted = numbers.bfloat16()
    assert torch.equal(rounded.isnan(), wanted.isnan())
    usual = ~wanted.isnan()
    assert torch.equal(rounded[usual].view(torch.int16), wanted[usual].view(torch.int16))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 15, 16, 17, 100])
@pytest.mark.parametrize("at_end", [True, False])
def test_it_keeps_to_its_operands(n: int, at_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, rounded = state(n, 0), torch.empty(n, dtype=torch.bfloat16)
    ops.adamw(*wanted, rounded, 0.5, RATE, BETA1, BETA2, EPS, 0.1, 3)
    monkeypatch.setattr(ops, "call", partial(fenced_call, at_end))
    found, again = state(n, 0), torch.empty(n, dtype=torch.bfloat16)
    ops.adamw(*found, again, 0.5, RATE, BETA1, BETA2, EPS, 0.1, 3)
    assert all(torch.equal(one, two) for one, two in zip((*found, again), (*wanted, rounded), strict=True))


def test_without_a_copy_in_bf16() -> None:
    with_one, without = state(33, 1), state(33, 1)
    ops.adamw(*with_one, torch.empty(33, dtype=torch.bfloat16), 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    ops.adamw(*without, None, 1.0, RATE, BETA1, BETA2, EPS, 0.1, 1)
    assert all(torch.equal(one, two) for one, two in zip(with_one, without, strict=True))
