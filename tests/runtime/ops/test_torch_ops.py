"""Ops as nodes of a traced graph, as in their rules: separate gradients, and only requested ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compiler.model.ops import RULES, Rule
from compiler.model.segments.passes import PASSES
from compiler.model.segments.torch_ops import TORCH, check_names, ops, register
from runtime.ops import OPS
from runtime.ops.formats import FORMATS
from tests.runtime.ops.cases import ACCUMULATIONS, FORWARD, PURE, Source, arguments, as_tuple, given_gradients


def call_counts(module: GraphModule) -> Counter[str]:
    """The number of calls of each operation in the traced graph, except getitem."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return Counter(name.removesuffix(".default") for name in names if "getitem" not in name)


def in_fake(args: tuple[Any, ...], function: Callable[..., Any], dynamic: frozenset[int] = frozenset()) -> GraphModule:
    """The graph of `function` on fake `args`. Arguments at `dynamic` share one symbolic number of rows."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbolic: Tensor | None = None
    fakes: list[Any] = []
    for index, arg in enumerate(args):
        if index not in dynamic:
            fakes.append(mode.from_tensor(arg, static_shapes=True) if isinstance(arg, Tensor) else arg)
            continue
        if symbolic is None:
            sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (arg.dim() - 1)
            symbolic = mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        with mode:
            fakes.append(symbolic.new_empty((symbolic.shape[0], *arg.shape[1:])))
    with mode:
        return make_fx(function)(*fakes)


def joint(op: Callable[..., Any], wanted: tuple[int, ...]) -> Callable[..., Any]:
    """A function of (tangent, *args) that returns the first output of `op` and gradients of arguments at `wanted`."""

    def function(tangent: Tensor, *args: Any) -> tuple[Tensor, ...]:
        for index in wanted:
            args[index].requires_grad_()
        output = as_tuple(op(*args))[0]
        return output, *torch.autograd.grad(output, [args[index] for index in wanted], tangent)

    return function


def with_like(op: str, args: tuple[Any, ...], inputs: tuple[Any, ...]) -> dict[str, list[Tensor]]:
    """Additional arguments of a gradient op in the dispatcher. `inputs`: arguments of its forward."""
    if op in FORWARD:
        return {}
    rule, gradient = next(
        (RULES[name], gradient) for name in FORWARD for gradient in RULES[name].gradients if gradient.op == op
    )
    values = dict(zip(rule.args, inputs, strict=True))
    return {"like": [values[name] for name in gradient.gives]}


def forward_of(op: str) -> str:
    return next(name for name in FORWARD if op in (name, *(gradient.op for gradient in RULES[name].gradients)))


def test_tables_name_the_same_ops() -> None:
    """Each rule has a function here or in torch; all other functions are only inserted into traced graphs."""
    integers = {
        "choice_counts",
        "real_counts",
        "replay_choices",
        "select_keys",
        "spread_padding",
        "table_choices",
    }  # they have no gradient
    assert {*RULES} == {*FORWARD, *TORCH, *integers} and not {*FORWARD} & {*TORCH, *integers}
    assert {*PURE, *ACCUMULATIONS} < {*OPS}
    passed = {node.op for passes in PASSES.values() for fusion in passes for node in fusion.make}
    for op in {*OPS} - {*PURE, *ACCUMULATIONS}:
        name = re.sub(f"_({'|'.join(FORMATS)}|fp8)(?![a-z0-9])", "", op).removesuffix("_")
        has_use = (
            name in passed or name in PURE or name in RULES or name.startswith(("quantise", "requantise", "dequantise"))
        )
        assert has_use, f"{op} is of no layer, no pass and no operand of eight bits"


def test_registration_is_explicit_and_happens_once() -> None:
    code = (
        "import torch, compiler.model.segments.torch_ops as l;assert not hasattr(torch.ops.dsc, 'linear'); l.register()"
    )
    subprocess.run([sys.executable, "-c", code + "; assert torch.ops.dsc.linear"], check=True)
    assert register() is register()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", PURE)
def test_fake_results_match_real_ones(op: str, dtype: torch.dtype) -> None:
    register()
    args, inputs = arguments(op, dtype), arguments(forward_of(op), dtype)
    real = OPS[op](*args)
    mode = FakeTensorMode()

    def faked(arg: Any) -> Any:
        return mode.from_tensor(arg) if isinstance(arg, Tensor) else arg

    like = {name: list(map(faked, tensors)) for name, tensors in with_like(op, args, inputs).items()}
    with mode:
        fake = getattr(torch.ops.dsc, op)(*map(faked, args), **like)
    for result, wanted in zip(as_tuple(fake), as_tuple(real), strict=True):
        assert (result.shape, result.dtype, result.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@pytest.mark.parametrize("op", PURE)
def test_torch_accepts_the_registration(op: str) -> None:
    register()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    args, inputs = list(arguments(op, torch.float32)), arguments(forward_of(op), torch.float32)
    like = with_like(op, tuple(args), inputs)
    if op in FORWARD:
        names = given_gradients(op)
        args = [arg.requires_grad_() if name in names else arg for name, arg in zip(RULES[op].args, args, strict=True)]
    torch.library.opcheck(getattr(torch.ops.dsc, op).default, tuple(args), like, test_utils=tests)


def test_names_that_are_not_the_functions_are_refused() -> None:
    """Another op, other arguments, or another order of them."""
    linear = RULES["linear"]
    wrong: list[tuple[Rule, str]] = [
        (replace(linear, args=("w", "x")), r"linear takes \['x', 'w'\]; the rule of linear passes it \('w', 'x'\)"),
        (replace(linear, args=("x", "w", "bias")), "linear takes"),
    ]
    for field, changes in (
        ("dgrad", {"reads": ("w", "d_y")}),
        ("dgrad", {"op": "linear_wgrad"}),
        ("dgrad", {"reads": ("d_y", "x")}),
        ("wgrad", {"reads": ("d_y", "x", "w")}),
    ):
        changed = replace(getattr(linear, field), **changes)
        wrong.append((replace(linear, **{field: changed}), f"{changed.op} takes"))
    for rule, message in wrong:
        with pytest.raises(AssertionError, match=message):
            check_names("linear", rule)
    for op in FORWARD:
        check_names(op, RULES[op])


@pytest.mark.parametrize("op", sorted(FORWARD))
def test_each_requested_gradient_is_one_node(op: str) -> None:
    register()
    rule = RULES[op]
    args = FORWARD[op](Source(torch.float32, 0))
    tangent = torch.ones_like(as_tuple(OPS[op](*args))[0])
    everything = tuple(rule.args.index(name) for gradient in rule.gradients for name in gradient.gives)
    for gradients, wanted in [
        (rule.gradients, everything),
        *(((gradient,), tuple(rule.args.index(name) for name in gradient.gives)) for gradient in rule.gradients),
    ]:
        module = in_fake((tangent, *args), joint(getattr(torch.ops.dsc, op), wanted))
        counts = call_counts(module)
        computed = [gradient.op for gradient in gradients if gradient.op]
        extra = set(counts) - {f"dsc.{op}", *(f"dsc.{name}" for name in computed)}
        # the unused tangent of permute's gate, or of logits at targets; torch marks an output that the backward reads
        reads = {read for gradient in gradients for read in gradient.reads}
        expected = {"aten.detach"} if reads & {*rule.differentiable} else set()
        several = ("permute", "permute_placed", "cross_entropy_part", "hyper_mix")
        expected |= {"aten.new_zeros"} if op in several else set()
        assert extra == expected
        assert all(counts[f"dsc.{name}"] == 1 for name in (op, *computed))


def test_experts_trace_with_a_symbolic_number_of_rows() -> None:
    table = ops()

    def experts(x_RD: Tensor, gate_R: Tensor, dy_RD: Tensor, up: Tensor, down: Tensor, offsets_E: Tensor) -> Any:
        leaves = [leaf.requires_grad_() for leaf in (x_RD, gate_R, up, down)]
        h_RM = table.grouped_linear(x_RD, up, offsets_E)
        y_RD = table.grouped_linear(table.gated_swiglu(h_RM, gate_R), down, offsets_E)
        return y_RD, *torch.autograd.grad(y_RD, leaves, dy_RD)

    source = Source(torch.float64, 0)

    def example(R: int, ends: list[int]) -> tuple[Tensor, ...]:
        rows = source.normal(R, 4), source.normal(R), source.normal(R, 4)
        return *rows, source.normal(4, 6, 4), source.normal(4, 4, 3), torch.tensor(ends, dtype=torch.int32)

    module = in_fake(example(5, [0, 2, 2, 5]), experts, dynamic=frozenset({0, 1, 2}))
    assert call_counts(module) == {
        "dsc.grouped_linear": 2,
        "dsc.gated_swiglu": 1,
        "dsc.gated_swiglu_dgrad": 1,
        "dsc.grouped_linear_dgrad": 2,
        "dsc.grouped_linear_wgrad": 2,
    }
    for R, ends in ((5, [0, 2, 2, 5]), (0, [0, 0, 0, 0]), (9, [1, 1, 9, 9])):
        args = example(R, ends)
        for result, wanted in zip(module(*args), experts(*(arg.clone() for arg in args)), strict=True):
            assert torch.equal(result, wanted)


def test_tracing_a_layer_hides_outputs_read_only_by_the_backward() -> None:
    table = ops()
    sizes = (4, 2, 4, 2, 3, 1e4)  # sequence, heads, nope, rope, value, theta

    def layer(h_TD: Tensor, norm_D: Tensor, q: Tensor, kv_down: Tensor, kv_up: Tensor, out: Tensor) -> tuple[Any, ...]:
        leaves = [leaf.requires_grad_() for leaf in (h_TD, norm_D, q, kv_down, kv_up, out)]
        x_TD = table.rmsnorm(h_TD, norm_D, 1e-6)
        latent, k_rope = table.split2(table.linear(x_TD, kv_down), 5)
        o = table.mla_attention(table.linear(x_TD, q), table.linear(latent, kv_up), k_rope, *sizes)
        y_TD = table.add(h_TD, table.linear(table.cat2(o, k_rope), out))
        loss = table.cross_entropy(y_TD, torch.tensor([0, 1, -1, 2, 3, 3, -1, 0]))
        return loss, *torch.autograd.grad(loss, leaves)

    source = Source(torch.float64, 1)
    shapes = ((8, 6), (6,), (12, 6), (7, 6), (14, 5), (6, 8))
    args = tuple(source.normal(*shape) for shape in shapes)
    counts = call_counts(make_fx(layer)(*(arg.clone() for arg in args)))
    ours = {name: count for name, count in counts.items() if name.startswith("dsc.")}
    assert ours == {
        "dsc.rmsnorm": 1, "dsc.linear": 4, "dsc.mla_attention": 1, "dsc.cross_entropy": 1,
        "dsc.rmsnorm_dgrad": 1, "dsc.rmsnorm_wgrad": 1, "dsc.linear_dgrad": 4, "dsc.linear_wgrad": 4,
        "dsc.mla_attention_dgrad": 1, "dsc.cross_entropy_dgrad": 1,
    }  # fmt: skip
    with pytest.raises(AttributeError):
        _ = table.linear_dgrad


def test_an_unused_output_has_no_tangent_and_costs_one_zero() -> None:
    register()
    args = arguments("permute", torch.float64)
    x_TD, gate_TK = args[0].requires_grad_(), args[1].requires_grad_()
    rows_SD, gate_S, *_ = torch.ops.dsc.permute(*args)
    dx_TD, dgate_TK = torch.autograd.grad(gate_S.sum(), (x_TD, gate_TK))
    assert not dx_TD.any() and torch.equal(dgate_TK, torch.ones_like(gate_TK))
    assert rows_SD.requires_grad
    y_TD, rstd_T = torch.ops.dsc.rmsnorm(x_TD, torch.ones(x_TD.shape[1], dtype=torch.float64), 1e-6)
    assert y_TD.requires_grad and not rstd_T.requires_grad
