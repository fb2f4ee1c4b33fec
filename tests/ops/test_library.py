"""The ops as nodes of a traced graph: shape rules, separate gradients, nothing traced that nobody asked for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compiler.segments.passes import PASSES
from runtime.ops import OPS, library
from runtime.ops.fakes import FAKES
from runtime.ops.formulas import FORMULAS
from tests.ops.cases import FORWARD, Source, arguments, as_tuple


def call_counts(module: GraphModule) -> Counter[str]:
    """How often each operation of the traced graph is called; getitem aside."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return Counter(name.removesuffix(".default") for name in names if "getitem" not in name)


def in_fake(args: tuple[Any, ...], function: Callable[..., Any], dynamic: frozenset[int] = frozenset()) -> GraphModule:
    """The graph of `function` on fake `args`; those at `dynamic` share one symbolic number of rows."""
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
    """A function of (tangent, *args) that gives the first output of `op` and gradients of the arguments at `wanted`."""

    def function(tangent: Tensor, *args: Any) -> tuple[Tensor, ...]:
        for index in wanted:
            args[index].requires_grad_()
        output = as_tuple(op(*args))[0]
        return output, *torch.autograd.grad(output, [args[index] for index in wanted], tangent)

    return function


def test_tables_name_the_same_ops() -> None:
    """The dispatcher has what layers call, and its gradients. All others come into graphs that are traced already."""
    assert {gradient.op for formula in FORMULAS.values() for gradient in formula.gradients} | set(FORMULAS) == {
        op for op in FAKES if not op.endswith("_")
    }
    assert {op.removesuffix("_") for op in FAKES if op.endswith("_")} == {op for op in FAKES if op.endswith("wgrad")}
    assert set(FAKES) < set(OPS)
    passed = {node.op for passes in PASSES.values() for each in passes for node in each.make}
    for op in set(OPS) - set(FAKES):
        name = op.replace("_fp8", "").removesuffix("_")
        known = name in passed or name in FAKES or name.startswith(("quantise", "requantise"))
        assert known, f"{op} is of no layer, no pass and no operand of eight bits"


def test_registration_is_asked_for_and_happens_once() -> None:
    code = "import torch, runtime.ops.library as l; assert not hasattr(torch.ops.dsc, 'linear'); l.register()"
    subprocess.run([sys.executable, "-c", code + "; assert torch.ops.dsc.linear"], check=True)
    assert library.register() is library.register()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", sorted(FAKES))
def test_shape_rule_equals_what_the_op_returns(op: str, dtype: torch.dtype) -> None:
    library.register()
    args = arguments(op, dtype)
    real = OPS[op](*args)
    mode = FakeTensorMode()
    with mode:
        fake = getattr(torch.ops.dsc, op)(*(mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args))
    if real is None:
        assert fake is None
        return
    for got, wanted in zip(as_tuple(fake), as_tuple(real), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@pytest.mark.parametrize("op", sorted(FAKES))
def test_torch_accepts_the_registration(op: str) -> None:
    library.register()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    args = list(arguments(op, torch.float32))
    formula = FORMULAS.get(op)
    if formula:
        given = {name for gradient in formula.gradients for name in gradient.gives}
        args = [arg.requires_grad_() if name in given else arg for name, arg in zip(formula.args, args, strict=True)]
    torch.library.opcheck(getattr(torch.ops.dsc, op).default, tuple(args), test_utils=tests)


@pytest.mark.parametrize("op", sorted(FORMULAS))
def test_each_gradient_is_one_node_and_only_if_asked_for(op: str) -> None:
    library.register()
    formula = FORMULAS[op]
    args = FORWARD[op](Source(torch.float32, 0))
    tangent = torch.ones_like(as_tuple(OPS[op](*args))[0])
    everything = tuple(formula.args.index(name) for gradient in formula.gradients for name in gradient.gives)
    for gradients, wanted in [
        (formula.gradients, everything),
        *(((one,), tuple(formula.args.index(name) for name in one.gives)) for one in formula.gradients),
    ]:
        module = in_fake((tangent, *args), joint(getattr(torch.ops.dsc, op), wanted))
        counts = call_counts(module)
        others = set(counts) - {f"dsc.{op}", *(f"dsc.{gradient.op}" for gradient in gradients)}
        # the unused tangent of permute's gate; and torch marks an output that the backward reads
        expected = {"mla_attention": "aten.detach", "gqa_attention": "aten.detach"}
        expected |= dict.fromkeys(("permute", "permute_placed"), "aten.new_zeros")
        assert others == ({expected[op]} if op in expected else set())
        assert all(counts[f"dsc.{name}"] == 1 for name in (op, *(gradient.op for gradient in gradients)))


def test_experts_trace_with_a_symbolic_number_of_rows() -> None:
    table = library.ops()

    def experts(x_RD: Tensor, gate_R: Tensor, dy_RD: Tensor, up: Tensor, down: Tensor, offsets_G: Tensor) -> Any:
        leaves = [leaf.requires_grad_() for leaf in (x_RD, gate_R, up, down)]
        h_RM = table.grouped_linear(x_RD, up, offsets_G)
        y_RD = table.grouped_linear(table.gated_swiglu(h_RM, gate_R), down, offsets_G)
        return y_RD, *torch.autograd.grad(y_RD, leaves, dy_RD)

    source = Source(torch.float64, 0)

    def example(R: int, ends: list[int]) -> tuple[Tensor, ...]:
        rows = source.normal(R, 4), source.normal(R), source.normal(R, 4)
        return *rows, source.normal(2, 6, 4), source.normal(2, 4, 3), torch.tensor(ends, dtype=torch.int32)

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
        for got, wanted in zip(module(*args), experts(*(arg.clone() for arg in args)), strict=True):
            assert torch.equal(got, wanted)


def test_the_torch_table_traces_a_layer_and_hides_what_only_the_backward_reads() -> None:
    table = library.ops()
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
    library.register()
    args = arguments("permute", torch.float64)
    x_TD, gate_TK = args[0].requires_grad_(), args[1].requires_grad_()
    rows_SD, gate_S, *_ = torch.ops.dsc.permute(*args)
    dx_TD, dgate_TK = torch.autograd.grad(gate_S.sum(), (x_TD, gate_TK))
    assert not dx_TD.any() and torch.equal(dgate_TK, torch.ones_like(gate_TK))
    assert rows_SD.requires_grad
    y_TD, rstd_T = torch.ops.dsc.rmsnorm(x_TD, torch.ones(x_TD.shape[1], dtype=torch.float64), 1e-6)
    assert y_TD.requires_grad and not rstd_T.requires_grad
