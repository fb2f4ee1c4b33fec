"""Every op on BF16 numbers against the op in FP64 on the same numbers, within bounds that follow from the format.

BF16 has 8 bits of precision: the error of rounding to nearest is at most 2⁻⁸ of the value. An op computes in FP32 and
rounds each result once (runtime/ops/product.py), so its error is that plus the FP32 error, which test_ops bounds by
2·10⁻⁵ for numbers of order one. Numbers that an op adds to an FP32 buffer are not rounded before the sum. All this
holds on every path that an op may take on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiler.model.ops import RULES
from compiler.model.ops import Tensor as Abstract
from runtime.ops import OPS
from tests.runtime.ops import cases
from tests.runtime.ops.cases import FORWARD, Source, as_tuple, gradient_arguments, widened
from tests.runtime.ops.native.paths import path  # noqa: F401
from tests.runtime.ops.test_ops import TOLERANCE, assert_pure

ROUNDED = 2.0**-8  # maximum relative error
FP32 = TOLERANCE[torch.float32]

Args = tuple[Any, ...]
pytestmark = pytest.mark.usefixtures("path")


def raised(args: Args) -> Args:
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)


def within(found: Tensor, exact: Tensor, what: str) -> None:
    """Assert that integers are equal, and that numbers are within the errors of storing them and of FP32."""
    assert found.shape == exact.shape, what
    if not found.is_floating_point():
        assert torch.equal(found, exact), what
        return
    rounded = ROUNDED if found.dtype == torch.bfloat16 else 0.0
    bound = rounded * exact.abs() + FP32 * (1 + exact.abs())
    worst = ((found.double() - exact).abs() / bound).amax() if exact.numel() else torch.zeros(())
    assert worst <= 1, f"{what}: {worst:.3g} times the bound"


def nearest(found: Tensor, exact: Tensor) -> list[bool]:
    """Whether each BF16 number is the one nearest to the exact result."""
    if found.dtype != torch.bfloat16:
        return []
    is_nearest = (found.double() - exact).abs() <= (exact.to(torch.bfloat16).double() - exact).abs()
    hits: list[bool] = is_nearest.flatten().tolist()
    return hits


def check(op: str, args: Args, seed: int = 1) -> dict[str, list[bool]]:
    """Check a forward op and its gradients, pure and accumulating, on BF16 arguments. Returns which are nearest."""
    hits: dict[str, list[bool]] = {}
    args = widened(op, args)
    for index, (result, exact) in enumerate(
        zip(as_tuple(OPS[op](*args)), as_tuple(OPS[op](*raised(args))), strict=True)
    ):
        within(result, exact, f"{op}, result {index}")
        hits[f"{op}, result {index}"] = nearest(result, exact)
    assert_pure(op, args)
    for name, gradient_args in gradient_arguments(op, args, Source(torch.bfloat16, seed)):
        exact = as_tuple(OPS[name](*raised(gradient_args)))
        for index, (result, wanted) in enumerate(zip(as_tuple(OPS[name](*gradient_args)), exact, strict=True)):
            within(result, wanted, f"{name}, result {index}")
            hits[f"{name}, result {index}"] = nearest(result, wanted)
        assert_pure(name, gradient_args)
        if name.endswith("wgrad"):
            accumulates(f"{name}_", gradient_args, exact[0])
    return hits


def accumulates(op: str, args: Args, exact: Tensor) -> None:
    """Check sums into an FP32 buffer with much larger numbers: BF16 sums would lose most of what is added."""
    acc = torch.full(exact.shape, 64.0)
    OPS[op](acc, *(arg for arg in args if isinstance(arg, Tensor)))
    added = acc.double() - 64.0
    assert ((added - exact).abs() <= FP32 + 2.0**-24 * (64 + exact.abs()) * len(args[0])).all(), op


@pytest.mark.parametrize("op", sorted(FORWARD))
def test_every_op_rounds_once(op: str) -> None:
    """Nearly all results are the nearest to the exact ones. A second rounding would change at least a quarter of them,
    mostly within the bounds."""
    hits: dict[str, list[bool]] = {}
    for seed in range(8):
        for name, nearest_hits in check(op, FORWARD[op](Source(torch.bfloat16, seed)), seed + 1).items():
            hits.setdefault(name, []).extend(nearest_hits)
    for name, nearest_hits in hits.items():
        assert nearest_hits.count(False) <= 1 + len(nearest_hits) / 500, (
            f"{name}: {nearest_hits.count(False)} of {len(nearest_hits)} are rounded twice"
        )


@pytest.mark.parametrize("op", sorted(FORWARD))
def test_dtypes_match_the_rules(op: str) -> None:
    """FP32 tensors in a BF16 run: statistics, losses, router logits, gate weights and their gradients."""
    args = widened(op, FORWARD[op](Source(torch.bfloat16, seed=0)))
    rule = RULES[op]
    tensors = [abstract(arg) if isinstance(arg, Tensor) else arg for arg in args]
    for result, tensor in zip(as_tuple(OPS[op](*args)), rule.infer(*tensors), strict=True):
        assert abstract(result) == tensor
    for name, gradient_args in gradient_arguments(op, args, Source(torch.bfloat16, seed=1)):
        (gradient,) = (rule_gradient for rule_gradient in rule.gradients if rule_gradient.op == name)
        given_to = dict(zip(rule.args, args, strict=True))
        for result, argument in zip(as_tuple(OPS[name](*gradient_args)), gradient.gives, strict=True):
            assert result.dtype == given_to[argument].dtype, (name, argument)


def abstract(tensor: Tensor) -> Abstract:
    return Abstract(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


SEED = st.integers(0, 2**31)
SMALL = st.integers(1, 9)
few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(SEED, st.integers(0, 70), SMALL, SMALL, st.integers(1, 8))
def test_experts_of_any_number_of_rows(seed: int, R: int, K: int, N: int, E: int) -> None:
    """Groups whose products extend into the rows of the next group, and the last ones, which cannot."""
    check("grouped_linear", cases.grouped_linear(Source(torch.bfloat16, seed), R, K, N, E), seed)
    check("gated_swiglu", cases.gated_swiglu(Source(torch.bfloat16, seed), R, N), seed)


@few
@given(SEED, st.integers(1, 3), st.integers(1, 12), st.integers(1, 8), st.data())
def test_rows_of_choices(seed: int, B: int, S: int, E: int, data: st.DataObject) -> None:
    K = data.draw(st.integers(1, E))
    source = Source(torch.bfloat16, seed)
    check("permute", cases.permute(source, B * S, 3, E, K), seed)
    check("unpermute", cases.unpermute(source, B * S, 3, E, K), seed)


def test_nan_stays_in_the_rows_of_its_expert() -> None:
    x_RK, w_ENK, _ = cases.grouped_linear(Source(torch.bfloat16, 2), R=40, K=8, N=8, E=3)
    ends = torch.tensor([11, 21, 40], dtype=torch.int32)
    w_ENK[1] = torch.nan
    y_RN = OPS["grouped_linear"](x_RK, w_ENK, ends)
    assert y_RN.isnan().all(1).tolist() == [11 <= row < 21 for row in range(40)]


def test_a_second_rounding_exceeds_the_bounds() -> None:
    """The bounds are tight: a SwiGLU that rounds its silu, as separate BF16 operations do, exceeds them."""
    (h_TM,) = cases.swiglu(Source(torch.bfloat16, 3), T=64, I=32)
    g_TI, u_TI = h_TM.chunk(2, dim=1)
    exact = OPS["swiglu"](h_TM.double())
    within(OPS["swiglu"](h_TM), exact, "swiglu")
    with pytest.raises(AssertionError, match="times the bound"):
        within(torch.nn.functional.silu(g_TI) * u_TI, exact, "swiglu in BF16")
