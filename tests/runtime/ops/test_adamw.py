"""AdamW: its formula, and BF16 moments. tests/runtime/ops/native tests the C++ further."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from runtime.ops.native import library
from runtime.state.optimizers.adamw import adamw
from tests.runtime.ops.cases import Source

MODULE = sys.modules["runtime.state.optimizers.adamw"]
RATE, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-8, 0.1
NUMBERS = (RATE, BETA1, BETA2, EPS, DECAY)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op uses no C++."""
    monkeypatch.setattr(library, "_functions", dict)


@pytest.fixture(params=["C++", "torch"])
def either(request: pytest.FixtureRequest) -> None:
    """The op in C++, if there is a library, and on torch."""
    if request.param == "torch":
        request.getfixturevalue("torch_alone")


def state(dtype: torch.dtype, moments: torch.dtype, elements: int = 1000) -> list[Tensor]:
    """Weights, gradients and moments in the middle of a run."""
    source = Source(dtype, seed=1)
    weights, gradients, first, second = (source.normal(elements) for _ in range(4))
    return [weights, gradients, (0.1 * first).to(moments), second.square().to(moments)]


def test_equals_adamw_of_torch() -> None:
    weights = Source(torch.float64, 0).normal(500)
    theirs = weights.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=RATE, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)
    for step in range(1, 6):
        gradients = Source(torch.float64, step).normal(500)
        adamw(weights, gradients, first, second, None, 0.5, *NUMBERS, step)
        theirs.grad = 0.5 * gradients
        optimizer.step()
        torch.testing.assert_close(weights, theirs.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("elements", [0, 1, 999])
def test_blocks_do_not_change_results(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    unblocked, parts = (state(torch.float32, torch.bfloat16, elements) for _ in range(2))
    rounded = [torch.empty(elements, dtype=torch.bfloat16) for _ in range(2)]
    adamw(*unblocked, rounded[0], 0.5, *NUMBERS, 3)
    monkeypatch.setattr(MODULE, "BLOCK", 100)
    adamw(*parts, rounded[1], 0.5, *NUMBERS, 3)
    assert all(
        torch.equal(left, right) for left, right in zip((*unblocked, rounded[0]), (*parts, rounded[1]), strict=True)
    )
    assert torch.equal(rounded[0], unblocked[0].to(torch.bfloat16))


@pytest.mark.usefixtures("either")
def test_bf16_moments_are_rounded_once_and_the_weights_see_them_before() -> None:
    """BF16 moments equal FP32 moments that start from the same BF16 values and are rounded after the step."""
    short = state(torch.float32, torch.bfloat16)
    wide = [tensor.double() for tensor in short]
    gradients = short[1].clone()
    adamw(*short, None, 0.5, *NUMBERS, 3)
    adamw(*wide, None, 0.5, *NUMBERS, 3)
    assert torch.equal(short[1], gradients)
    assert short[2].dtype == short[3].dtype == torch.bfloat16
    for moment, exact in zip(short[2:], wide[2:], strict=True):
        nearest, half_unit = exact.bfloat16(), 2.0**-8 * exact.abs().log2().floor().exp2()
        clear = (exact - nearest.double()).abs() < 0.998 * half_unit  # not halfway, despite FP32 errors
        assert torch.equal(moment[clear], nearest[clear]) and clear.double().mean() > 0.9
        assert ((moment.double() - exact).abs() < 1.002 * half_unit).all()
    # If moments were rounded before, the error of weights would be 2⁻⁹ of the rate.
    torch.testing.assert_close(short[0].double(), wide[0], rtol=2.0**-22, atol=RATE * 2.0**-19)


@pytest.mark.usefixtures("either")
def test_a_bf16_moment_that_changes_by_little_stays() -> None:
    """As the op's docstring says: with 1 − β₂ = 0.001 a BF16 second moment does not decay, with 0.05 it does."""
    for beta2, decays in ((0.999, False), (0.95, True)):
        weights, nothing, first = (torch.zeros(300) for _ in range(3))
        second = (1 + torch.arange(300) / 64).to(torch.bfloat16)
        before = second.clone()
        adamw(weights, nothing, first.to(torch.bfloat16), second, None, 1.0, RATE, 0.9, beta2, EPS, 0.0, 50)
        assert torch.equal(second, before) != decays
        assert not decays or (second < before).all()


def test_bf16_weights_and_gradients_are_computed_with_in_fp32() -> None:
    short = [tensor.bfloat16() for tensor in state(torch.float32, torch.bfloat16)]
    exact = [tensor.double() for tensor in short]
    adamw(*short, None, 0.5, *NUMBERS, 3)
    adamw(*exact, None, 0.5, *NUMBERS, 3)
    for tensor, expected in zip(short, exact, strict=True):
        assert ((tensor.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-7).all()
