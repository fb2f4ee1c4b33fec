"""Every op against its reference under torch's autograd, and the properties that all results have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.model.ops import RULES
from compiler.model.segments.torch_ops import register
from runtime.ops import OPS
from tests.runtime.ops.cases import (
    ACCUMULATIONS,
    FORWARD,
    PURE,
    Source,
    arguments,
    as_tuple,
    given_gradients,
    gradient_arguments,
)
from tests.runtime.ops.references import REFERENCES

FORWARD_OPS = sorted(FORWARD)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-5}  # of float64 gradients of order one


def assert_close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, wanted.to(got.dtype), rtol=tolerance, atol=tolerance)


def gradients(
    op: str, function: Any, args: tuple[Any, ...], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """(differentiable outputs, gradients of every differentiable argument) of `function`."""
    rule, names = RULES[op], given_gradients(op)
    values = [
        arg.detach().clone().requires_grad_() if name in names else arg
        for name, arg in zip(rule.args, args, strict=True)
    ]
    outputs = [output for output in as_tuple(function(*values))][: len(rule.differentiable)]
    leaves = [value for name, value in zip(rule.args, values, strict=True) if name in names]
    return outputs, list(torch.autograd.grad(outputs, leaves, tangents))


def assert_pure(op: str, args: tuple[Any, ...]) -> None:
    """Assert that two calls of an op give equal bits, contiguous and in new storage, and write to no argument."""
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    storages = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
    for result, again in zip(as_tuple(OPS[op](*args)), as_tuple(OPS[op](*args)), strict=True):
        assert result.is_contiguous() and (result.numel() == 0 or result.untyped_storage().data_ptr() not in storages)
        assert torch.equal(result, again)
    for arg, copy in zip(args, before, strict=True):
        assert torch.equal(arg, copy) if isinstance(arg, Tensor) else arg == copy


def compare(op: str, args: tuple[Any, ...], dtype: torch.dtype, seed: int = 1) -> None:
    """Compare the op in torch's dispatcher, in `dtype`, with its reference in float64."""
    register()
    rule, source = RULES[op], Source(dtype, seed)
    lowered = tuple(arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
    raised = tuple(
        arg.to(torch.float64) if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in lowered
    )
    plain = as_tuple(OPS[op](*lowered))
    assert_pure(op, lowered)
    for gradient_op, gradient_args in gradient_arguments(op, lowered, source):
        assert_pure(gradient_op, gradient_args)
    tangents = [source.normal(*plain[index].shape) for index in range(len(rule.differentiable))]
    results, got_gradients = gradients(op, getattr(torch.ops.dsc, op), lowered, tangents)
    wanted, wanted_gradients = gradients(op, REFERENCES[op], raised, [tangent.double() for tangent in tangents])
    for result, expected, direct in zip(results, wanted, plain, strict=False):
        assert_close(result, expected, TOLERANCE[dtype])
        assert torch.equal(result, direct), "the dispatcher and the plain function differ"
    for result, expected in zip(got_gradients, wanted_gradients, strict=True):
        assert_close(result, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("op", FORWARD_OPS)
def test_op_and_gradients_equal_reference(op: str, dtype: torch.dtype) -> None:
    compare(op, FORWARD[op](Source(dtype, seed=0)), dtype)


def test_integer_results_equal_reference() -> None:
    for op, integer in (("permute", (2, 3)), ("route", (1,)), ("route_scores", (1,))):
        args = arguments(op, torch.float64)
        for index in integer:
            assert torch.equal(OPS[op](*args)[index], REFERENCES[op](*args)[index])


@pytest.mark.parametrize("op", ACCUMULATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_accumulation_adds_the_weight_gradient(op: str, dtype: torch.dtype) -> None:
    plain = arguments(op.removesuffix("_"), dtype)
    acc, *args = arguments(op, dtype)
    wanted = acc + OPS[op.removesuffix("_")](*plain)
    assert OPS[op](acc, *args) is None
    assert_close(acc, wanted, TOLERANCE[dtype] if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("op", PURE)
def test_results_are_contiguous_repeatable_and_own_their_storage(op: str) -> None:
    assert_pure(op, arguments(op, torch.float32))


@pytest.mark.parametrize("op", PURE)
def test_sizes_of_one_do_not_return_views(op: str) -> None:
    sizes = {"mla_attention": {"B": 1, "H": 1, "rope": 2}, "gqa_attention": {"B": 1, "G": 1, "r": 1, "C": 2}}
    sizes |= {"head_rmsnorm": {"T": 1, "H": 1, "C": 1}, "grouped_linear": {"R": 1, "E": 1}}
    sizes |= {"permute": {"T": 1, "E": 1, "K": 1}, "unpermute": {"T": 1, "E": 1, "K": 1}}
    sizes |= {
        "route": {"T": 1, "groups": 1, "members": 1, "top_groups": 1, "top_k": 1, "normalize": False, "scale": 1.0}
    }
    sizes["route_scores"] = sizes["route"]
    assert_pure(op, arguments(op, torch.float32, sizes=sizes))


@pytest.mark.parametrize("op", ACCUMULATIONS)
def test_accumulation_writes_only_to_its_accumulator(op: str) -> None:
    args = arguments(op, torch.float32)
    before = [arg.clone() for arg in args]
    OPS[op](*args)
    assert not torch.equal(args[0], before[0])
    assert all(torch.equal(arg, copy) for arg, copy in zip(args[1:], before[1:], strict=True))


@pytest.mark.parametrize("op", PURE)
def test_views_of_columns_give_the_same_contiguous_results(op: str) -> None:
    args = arguments(op, torch.float64)
    rule = RULES[op] if op in FORWARD else None
    weights = {"w"} if rule else set()
    names = rule.args if rule else ("",) * len(args)
    strided = [
        torch.cat((arg, arg, arg), dim=1)[:, arg.shape[1] : 2 * arg.shape[1]]
        if isinstance(arg, Tensor) and arg.dim() == 2 and arg.is_floating_point() and name not in weights
        else arg
        for name, arg in zip(names, args, strict=True)
    ]
    for result, wanted in zip(as_tuple(OPS[op](*strided)), as_tuple(OPS[op](*args)), strict=True):
        assert result.is_contiguous()
        assert_close(result, wanted, 1e-13)


@pytest.mark.parametrize(
    "op",
    [
        "rmsnorm",
        "head_rmsnorm",
        "hyper_add",
        "hyper_mix",
        "hyper_products",
        "swiglu",
        "gated_swiglu",
        "clamped_swiglu",
        "geglu_tanh",
        "sequence_balance",
        "balance_scores",
        "route_scores",
        "sqrt_softplus",
        "cross_entropy",
        "policy_loss",
        "linear",
        "gqa_attention",
    ],
)
def test_finite_differences_agree(op: str) -> None:
    register()
    rule, args, names = RULES[op], arguments(op, torch.float64), given_gradients(op)
    inputs = tuple(arg.requires_grad_() if name in names else arg for name, arg in zip(rule.args, args, strict=True))

    def differentiable(*values: Any) -> tuple[Tensor, ...]:
        return as_tuple(getattr(torch.ops.dsc, op)(*values))[: len(rule.differentiable)]

    assert torch.autograd.gradcheck(differentiable, inputs, atol=1e-6)
