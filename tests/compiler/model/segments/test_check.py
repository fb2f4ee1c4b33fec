"""The check of base graphs: one that differs from torch's trace is refused, naming segment and node; gradient names
follow one rule; and the graphs of all ops agree between both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler import ir
from compiler.emit.segment_cache import emit
from compiler.model.ops import RULES, Rule, Tensor
from compiler.model.segments import check
from compiler.model.segments.interpret import base_graph
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.torch_ops import ops
from compiler.model.segments.trace import trace
from compiler.pipeline import compile_spec
from dsl.load import load
from tests.compiler.model.segments.running import TARGET
from tests.compiler.model.segments.specs import spec
from tests.compiler.model.segments.test_recompute import segments

T, D = 4, 6
TINY = Path(__file__).parents[4] / "specs" / "tiny.dsc"


def segment(
    function: Callable[..., tuple[Any, ...]], *outputs: str, params: str = "wg", inputs: tuple[str, ...] = ("x",)
) -> ir.Segment:
    """A segment of a matrix `w`, a vector `g` and inputs [T, D]."""
    shapes = {"w": (D, D), "g": (D,)}
    arguments = tuple(ir.Input(name, (T, D), "float64") for name in inputs)
    weights = tuple(ir.Param(name, shapes[name], "float64") for name in params)
    return ir.Segment("any", function, weights, arguments, tuple(ir.Output(name) for name in outputs))


def both(subject: ir.Segment) -> Joint:
    """The base graph, which is equal in both readings."""
    interpreted = base_graph(subject)
    check.base_graph(trace(subject, ops()), interpreted)
    return interpreted


# ---------------------------------------------------------------- refusals


def wrong_tensors(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[Rule], Rule]:
    def mutated(rule: Rule) -> Rule:
        def infer(*args: Any) -> tuple[Tensor, ...]:
            tensors = list(rule.infer(*args))
            tensors[index] = change(tensors[index])
            return tuple(tensors)

        return replace(rule, infer=infer)

    return mutated


def wrong_dgrad(**changes: Any) -> Callable[[Rule], Rule]:
    return lambda rule: replace(rule, dgrad=replace(rule.dgrad, **changes))


MUTATIONS: dict[str, tuple[str, str, Callable[[Rule], Rule], str]] = {
    "gradient op": (
        "shared",
        "linear",
        wrong_dgrad(op="linear_wide_dgrad"),
        r"segment shared: the op rules give `(\w+) = linear_wide_dgrad\(\w+, down\)`, torch traced "
        r"`\1 = linear_dgrad\(\w+, down\)`",
    ),
    "arguments of a gradient": (
        "shared",
        "linear",
        wrong_dgrad(reads=("w", "d_y")),
        r"segment shared: the op rules give `(\w+) = linear_dgrad\(down, (\w+)\)`, torch traced "
        r"`\1 = linear_dgrad\(\2, down\)`",
    ),
    "saved value": (
        "attention",
        "rmsnorm",
        wrong_dgrad(reads=("d_y", "y", "w", "rstd")),
        r"segment attention: the op rules give `\w+ = rmsnorm_dgrad\(\w+, rmsnorm_\d, ",
    ),
    "dtype": (
        "shared",
        "swiglu",
        wrong_tensors(0, lambda tensor: replace(tensor, dtype="float32")),
        r"segment shared: at `swiglu_0 = swiglu\(linear_0\)`, swiglu_0 is float32 \[16, 5\] by the op rules, "
        r"and float64 \[16, 5\] in the torch trace",
    ),
    "shape": (
        "dense",
        "rmsnorm",
        wrong_tensors(1, lambda tensor: replace(tensor, shape=(*tensor.shape, 1))),
        r"segment dense: at `rmsnorm_0, rmsnorm_0_rstd = rmsnorm\(add_0, norm, 1e-06\)`, "
        r"rmsnorm_0_rstd is float64 \[16, 1\] by the op rules, and float64 \[16\] in the torch trace",
    ),
    "order of results": (
        "attention",
        "mla_attention",
        wrong_dgrad(gives=("kv", "q", "k_rope")),
        r"segment attention: .*mla_attention_dgrad",
    ),
    "no gradient": ("shared", "swiglu", lambda rule: replace(rule, dgrad=None), "segment shared: .* has no gradient"),
}


def mutate(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Rule], Rule]) -> None:
    """The interpreter reads a wrong rule; torch has the right one."""
    ops()
    monkeypatch.setattr("compiler.model.segments.interpret.RULES", RULES | {op: change(RULES[op])})


@pytest.mark.parametrize(("kind", "op", "change", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_rule_is_refused_by_segment_and_node(
    kind: str, op: str, change: Callable[[Rule], Rule], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = segments(spec())[kind]
    emit(subject, TARGET)
    mutate(monkeypatch, op, change)
    with pytest.raises(AssertionError, match=message):
        emit(subject, TARGET)


def test_compiling_new_segments_runs_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *MUTATIONS["gradient op"][1:3])
    with pytest.raises(AssertionError, match=r"segment \w+: the op rules give `\w+ = linear_wide_dgrad"):
        compile_spec(load(TINY))


def test_returned_gradients_are_compared() -> None:
    interpreted = base_graph(segments(spec())["join"])
    (name, value), *rest = interpreted.gradients
    with pytest.raises(AssertionError, match=r"segment join: gradients: h is residual by the op rules, and d_\w+"):
        check.base_graph(interpreted, replace(interpreted, gradients=((name, "residual"), *rest)))
    assert (name, value) == ("h", "d_y")


def test_a_value_that_differs_is_refused() -> None:
    """In its name, its shape or its dtype."""
    interpreted = base_graph(segments(spec())["attention"])
    name = "mla_attention_0_lse"
    for changed in (Tensor((1,), "float64"), replace(interpreted.tensors[name], dtype="float32")):
        with pytest.raises(AssertionError, match=f"{name} is .* by the op rules"):
            check.base_graph(interpreted, replace(interpreted, tensors=interpreted.tensors | {name: changed}))
    lse = tuple(
        replace(node, outputs=tuple(value.replace("_lse", "_sum") for value in node.outputs))
        for node in interpreted.nodes
    )
    with pytest.raises(AssertionError, match=r"segment attention: .* torch traced no such node"):
        check.base_graph(replace(interpreted, nodes=lse, tensors=interpreted.tensors), interpreted)


def test_a_node_too_many_or_too_few_is_refused() -> None:
    complete = base_graph(segments(spec())["shared"])
    reduced = replace(complete, weights=complete.weights[:-1])
    assert len(reduced.needed_nodes) < len(complete.needed_nodes)
    for traced, interpreted, message in (
        (reduced, complete, "torch traced no such node"),
        (complete, reduced, "op rules give no such node"),
    ):
        with pytest.raises(AssertionError, match=message):
            check.base_graph(traced, interpreted)


# ---------------------------------------------------------------- names


def test_a_gradient_of_several_values_is_named_by_the_last_of_them() -> None:
    """A sum passes its gradient on unchanged: to the product, and to an earlier sum."""

    def function(ops: Any, p: Any, x: Any) -> tuple[Any, ...]:
        summed = ops.add(ops.linear(x, p.w), ops.swiglu(ops.cat2(x, x)))
        return (ops.rmsnorm(ops.add(summed, x), p.g, 1e-6),)

    joint = both(segment(function, "y"))
    assert OpNode("rmsnorm_dgrad", ("d_y", "add_1", "g", "rmsnorm_0_rstd"), ("d_add_1",)) in joint.nodes
    assert OpNode("linear_dgrad", ("d_add_1", "w"), ("linear_dgrad_0",)) in joint.nodes
    assert not {"d_add_0", "d_linear_0", "d_swiglu_0"} & joint.tensors.keys()


def test_a_gradient_that_is_the_tangent_is_named_by_the_output() -> None:
    joint = both(segment(lambda ops, p, x: (ops.add(ops.linear(x, p.w), x),), "y", params="w"))
    assert (
        joint.gradients == (("x", "d_x"),) and OpNode("linear_wgrad", ("d_y", "x"), ("linear_wgrad_0",)) in joint.nodes
    )
    assert "d_linear_0" not in joint.tensors


def test_an_input_comes_before_every_value_of_the_forward() -> None:
    def function(ops: Any, p: Any, x: Any, other: Any) -> tuple[Any, ...]:
        return (ops.linear(ops.add(x, other), p.w),)

    joint = both(segment(function, "y", params="w", inputs=("x", "other")))
    assert joint.gradients == (("x", "d_add_0"), ("other", "d_add_0"))


def test_halves_with_one_gradient() -> None:
    def function(ops: Any, p: Any, x: Any) -> tuple[Any, ...]:
        gate, up = ops.split2(x, D // 2)
        return (ops.swiglu(ops.linear(ops.cat2(ops.add(gate, up), up), p.w)),)

    joint = both(segment(function, "y", params="w"))
    assert {"d_split2_0_b", "d_linear_0", "d_cat2_0"} <= joint.tensors.keys()


def test_names_of_gradient_sums_differ_from_those_of_the_forward() -> None:
    def function(ops: Any, p: Any, x: Any) -> tuple[Any, ...]:
        summed = ops.add(ops.linear(x, p.w), x)
        return (ops.linear(ops.rmsnorm(summed, p.g, 1e-6), p.w),)

    joint = both(segment(function, "y"))
    assert dict(joint.weights)["w"] == "add_1"
    results = [value for node in joint.nodes for value in node.outputs]
    assert len(results) == len({*results})


# ---------------------------------------------------------------- graphs of any ops


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "linear", "rmsnorm", "swiglu", "split2", "hand"]), *[st.integers(0, 9)] * 2)
    )
)
def test_graphs_of_any_ops_are_equal(steps: list[tuple[str, int, int]]) -> None:
    def function(ops: Any, p: Any, x: Any) -> tuple[Any, ...]:
        values = [x]
        for op, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if op == "add":
                values.append(ops.add(a, b))
            elif op == "linear":
                values.append(ops.linear(a, p.w))
            elif op == "rmsnorm":
                values.append(ops.rmsnorm(a, p.g, 1e-6))
            elif op == "swiglu":
                values.append(ops.swiglu(ops.cat2(a, b)))
            elif op == "split2":
                first_part, second_part = ops.split2(a, 1 + second % (D - 1))
                values.append(ops.cat2(second_part, first_part))
        values = [ops.rmsnorm(ops.linear(value, p.w), p.g, 1e-6) for value in values]
        return (reduce(ops.add, values), x)

    both(segment(function, "y", "handed"))
