"""Every rule against the functions, run on small tensors of each dtype: shapes and dtypes of the results of an op, its
gradients and their accumulating forms. test_ops compares the numbers of gradients with autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiler.emit.kernels import KERNELS, ON_TORCH, emit_kernel
from compiler.ir import Buffer
from compiler.model.ops import GRADIENTS, RULES, Extent, Gradient, Rule
from compiler.model.ops import Tensor as Abstract
from compiler.model.ops.rule import statistics_dtype
from compiler.model.segments.passes import PASSES
from compiler.model.segments.torch_ops import TORCH, abstract
from dsl.schema import OPTIMIZERS
from runtime.ops import OPS
from tests.runtime.ops.cases import ACCUMULATIONS, FORWARD, Args, Source, as_tuple, select_keys, widened

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
FUNCTIONS: dict[str, Callable[..., Any]] = OPS | TORCH
REAL_6 = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.int32)
PLAIN: dict[str, Callable[[Source], Args]] = {
    "add": lambda source: (source.normal(5, 4), source.normal(5, 4)),
    "replay_choices": lambda source: (source.choices(6, 5, 2), source.choices(6, 5, 2)),
    "table_choices": lambda source: (source.below(9, 6), source.choices(9, 7, 3).to(torch.int32)),
    "choice_counts": lambda source: (source.choices(6, 5, 2), 5, 3),
    "real_counts": lambda source: (source.choices(6, 5, 2), REAL_6, None, 5, 3),
    "spread_padding": lambda source: (source.choices(6, 4, 2), REAL_6, 4, 2),
    "cat2": lambda source: (source.normal(5, 4), source.normal(5, 3)),
    "select_keys": select_keys,
    "split2": lambda source: (source.normal(5, 7), 3),
}


def arguments(op: str, dtype: torch.dtype) -> Args:
    source = Source(dtype, seed=0)
    return widened(op, FORWARD[op](source)) if op in FORWARD else PLAIN[op](source)


def check(op: str, rule: Rule, dtype: torch.dtype) -> None:
    """Assert that the results of the functions have the shapes and dtypes of the rule."""
    args = arguments(op, dtype)
    results = as_tuple(FUNCTIONS[op](*args))
    assert tuple(map(abstract, results)) == rule.infer(*map(abstract, args)), f"results of {op}"
    assert len(rule.args) == len(args) and len(rule.outputs) == len(results)
    values = dict(zip((*rule.args, *rule.outputs), (*args, *results), strict=True))
    values |= {f"d_{name}": torch.ones_like(values[name]) for name in rule.differentiable}
    for gradient in rule.gradients:
        check_gradient(gradient, values)


def check_gradient(gradient: Gradient, values: dict[str, Any]) -> None:
    """Assert that a gradient, and the buffer that it is added to, has its argument's shape and dtype, at least FP32."""
    reads = [values[r.argument].shape[r.dim] if isinstance(r, Extent) else values[r] for r in gradient.reads]
    wanted = [abstract(values[name]) for name in gradient.gives]
    if not gradient.op:
        assert [abstract(reads[0])] * len(wanted) == wanted
        return
    results = as_tuple(FUNCTIONS[gradient.op](*reads))
    assert list(map(abstract, results)) == wanted, f"results of {gradient.op}"
    if gradient.op.endswith("_wgrad"):
        (tensor,) = wanted
        buffer = torch.full(tensor.shape, 8.0, dtype=getattr(torch, statistics_dtype(tensor.dtype)))
        assert FUNCTIONS[f"{gradient.op}_"](buffer, *(read for read in reads if isinstance(read, Tensor))) is None
        assert abstract(buffer) == Abstract(tensor.shape, statistics_dtype(tensor.dtype))
        torch.testing.assert_close((buffer - 8.0).double(), results[0].double(), rtol=2e-2, atol=2e-5)


ONE_TEXT = ("select_keys", "indexer_loss", "delta_rule")  # whose kernels read the starts of documents if there are any


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", RULES)
def test_a_rule_describes_the_results_of_its_functions(op: str, dtype: torch.dtype) -> None:
    check(op, RULES[op], dtype)


def inferring(index: int, **changes: Any) -> Callable[[Rule], Rule]:
    def changed(rule: Rule) -> Rule:
        def infer(*args: Any) -> tuple[Abstract, ...]:
            results = list(rule.infer(*args))
            results[index] = replace(results[index], **changes)
            return tuple(results)

        return replace(rule, infer=infer)

    return changed


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("rmsnorm", inferring(1, dtype="bfloat16")),
        ("linear_wide", inferring(0, dtype="bfloat16")),
        ("mla_attention", inferring(1, shape=(1,))),
        ("permute", inferring(3, shape=(6,))),
        ("linear", lambda rule: replace(rule, dgrad=replace(rule.dgrad, gives=("w",)))),
        ("linear", lambda rule: replace(rule, wgrad=replace(rule.wgrad, reads=("x", "d_y")))),
        ("gated_swiglu", lambda rule: replace(rule, dgrad=replace(rule.dgrad, gives=("gate", "h")))),
        ("embedding", lambda rule: replace(rule, wgrad=replace(rule.wgrad, reads=("d_y", "tokens", Extent("w", 1))))),
        ("cat2", lambda rule: replace(rule, dgrad=replace(rule.dgrad, reads=("d_y", Extent("b", 1))))),
    ],
)
def test_a_rule_that_differs_is_refused(op: str, change: Callable[[Rule], Rule]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        check(op, change(RULES[op]), torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {"outputs": ("x",)},
        {"differentiable": ("z",)},
        {"dgrad": Gradient("linear_dgrad", reads=("d_y", "v"), gives=("x",))},
        {"dgrad": Gradient("linear_dgrad", reads=("d_y", "w"), gives=("v",))},
    ],
    ids=["a name twice", "no such output", "no such argument", "gradient of nothing"],
)
def test_contradictory_rules_are_refused_at_construction(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        replace(RULES["linear"], **changes)


@pytest.mark.parametrize(
    "op", [op for op, rule in RULES.items() if rule.optional and op in KERNELS and op not in ONE_TEXT]
)
def test_ops_with_documents_have_a_separate_kernel(op: str) -> None:
    free = {"softcap": 0.0, "sinks": False} if op == "bounded_attention_peaks" else {}  # unsupported
    args = FORWARD[op](Source(torch.bfloat16, seed=0), **free)
    before = args[: RULES[op].args.index("starts")]
    buffers = tuple(Buffer("x", tuple(x.shape), "bfloat16") if isinstance(x, Tensor) else x for x in before)
    starts = Buffer("starts", buffers[0].shape[:1], "int32")
    plain, apart = (emit_kernel(op, arguments, 132) for arguments in (buffers, (*buffers, starts)))
    assert plain and apart and apart.name == f"{plain.name}_documents"


def test_every_op_of_emitted_code_has_a_kernel_or_runs_on_torch() -> None:
    """Either is stated explicitly for ops that layers call, their gradients, and fused ops."""
    ends = {f"{gradient.op}_" if f"{gradient.op}_" in ACCUMULATIONS else gradient.op for gradient in GRADIENTS.values()}
    fused = {node.op for passes in PASSES.values() for fusion in passes for node in fusion.make}
    fused = {f"{op}_" if f"{op}_" in OPS else op for op in fused if op in OPS or f"{op}_" in OPS}
    inward = {"add_bias_wgrad", "rmsnorm_wgrad"}  # sums of input gradients, which action I computes
    called = ({*RULES} | ends | fused | inward | {"columns", "quantise", "quantise_both", "requantise"}) - {"split2"}
    assert not called - {*KERNELS, *ON_TORCH}
    assert not {*KERNELS} & {*ON_TORCH} and {*KERNELS} <= {*OPS, *OPTIMIZERS} and {*ON_TORCH} <= called


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("op", ["mla_attention", "gqa_attention", "bounded_attention"])
def test_context_ranks_share_the_flops_of_attention(op: str, window: int) -> None:
    """Each of four ranks has a fourth of the queries and all keys, and computes a fourth of the FLOPs."""
    rule, sizes = RULES[op], {"sequence": 64, "heads": 4, "nope": 8, "rope": 4, "value": 8, "window": window}
    full, part = (SimpleNamespace(q=(rows, 48), **sizes) for rows in (64, 16))
    assert rule.dgrad
    for flops in (rule.flops, rule.dgrad.flops):
        assert flops(full) == 4 * flops(part) > 0
