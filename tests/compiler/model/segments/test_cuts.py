"""Segments of every kind and size pass the check; contents and costs of cuts; and that emitted text is checked."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler import ir
from compiler.emit.segment_cache import emit
from compiler.model.layers import LAYERS, Place
from compiler.model.ops import RULES
from compiler.model.segments import check, printer
from compiler.model.segments.interpret import cut, interpret
from compiler.model.segments.joint import OpNode
from compiler.model.segments.split import split
from compiler.plan.blocks import model_blocks, model_steps
from dsl.schema import Balance, Clamp, Csa, Dense, Hca, HeadDim, HyperConnections, Indexer, Parallel, Spec
from dsl.schema.model import Act
from tests.compiler.model.segments.costs import forward_flops
from tests.compiler.model.segments.running import TARGET
from tests.compiler.model.segments.specs import (
    DENSE,
    clipped,
    compressed,
    deepseek_v3,
    deltanet,
    gqa,
    mla,
    moe,
    padded,
    quickstart_sized,
    softmax_moe,
    spec,
)
from tests.runtime.step.specs import with_rewards

GROUPED = spec(layers=(DENSE, softmax_moe()), attention=gqa())
# Kinds that a model has where tensor ranks split it, and where context ranks split its sequences.
BETWEEN_ROWS = {"added", "enter", "between", "leave", "loss", "products"}
IN_SEQUENCES = {"project", "attend", "balance"}
OF_STREAMS = {"streams"}  # of several residual streams
STREAMS = spec(hyper_connections=HyperConnections(streams=2))
WHOLE = spec(layers=(DENSE, moe(inner=6)), attention=gqa(), mtp=False)
SPLIT = WHOLE.model_copy(
    update={
        "parallel": Parallel(pipeline=1, expert=1, data=1, tensor=2),
        "model": WHOLE.model.model_copy(
            update={"norm": "sandwich", "residual_scale": 0.5, "vocab": 30, "attention": gqa(qk_norm="width")}
        ),
    }
)


def parallel(model_spec: Spec, **degrees: int) -> Spec:
    """The spec on ranks of some degrees."""
    return model_spec.model_copy(update={"parallel": Parallel(pipeline=1, data=1, **degrees)})


SLICED = parallel(WHOLE, expert=1, expert_tensor=2)
CONTEXT = parallel(spec(), context=2)


def segments(model_spec: Spec) -> list[ir.Segment]:
    """The distinct segments of a model."""
    uses = [step for step in model_steps(model_spec) if isinstance(step, ir.Use)]
    return list({use.segment.key: use.segment for use in uses}.values())


def no_kernels(_: OpNode) -> None:
    return None


def segment(kind: str) -> ir.Segment:
    model_spec = SPLIT if kind in BETWEEN_ROWS else CONTEXT if kind in IN_SEQUENCES else spec()
    model_spec = STREAMS if kind in OF_STREAMS else model_spec
    return next(s for s in segments(model_spec) if s.kind == kind)


@pytest.mark.parametrize(
    "model_spec",
    [spec(), GROUPED, quickstart_sized(), deepseek_v3("fp32")],
    ids=["small", "grouped queries", "quickstart", "DeepSeek-V3"],
)
def test_the_trace_of_torch_equals_the_op_rules(model_spec: Spec) -> None:
    """`emit` compares the graphs, also at the published size, as tracing allocates no storage."""
    names = {emit(s, TARGET).name for s in segments(model_spec)}
    assert len(names) == len(segments(model_spec)), "two segments, one module"
    assert {s.kind for s in segments(model_spec)} == set(LAYERS) - BETWEEN_ROWS - IN_SEQUENCES - OF_STREAMS


@settings(max_examples=8)
@given(st.data())
def test_torch_traces_it_for_any_size(data: st.DataObject) -> None:
    def size(low: int = 1, high: int = 12) -> int:
        return data.draw(st.integers(low, high))

    groups, per_group = size(1, 4), size(1, 4)
    top_groups = size(1, groups)
    experts = groups * per_group
    ranks = data.draw(st.sampled_from([d for d in range(1, experts + 1) if experts % d == 0]))
    ffn = moe(
        experts=experts,
        top_k=size(1, top_groups * per_group),
        inner=size(),
        shared=size(0, 2),
        groups=groups,
        top_groups=top_groups,
        score=data.draw(st.sampled_from(["sigmoid", "softmax"])),
        normalize=data.draw(st.booleans()),
        balance=data.draw(st.sampled_from([Balance(), moe().balance, softmax_moe().balance])),
    )
    latent = mla(
        heads=size(),
        query_rank=data.draw(st.none() | st.integers(1, 9)),
        kv_rank=size(),
        head_dim=HeadDim(nope=size(), rope=2 * size(), value=size()),
    )
    kv_heads = size(1, 4)
    norm = data.draw(st.sampled_from([None, "head", "width"]))
    grouped = gqa(heads=kv_heads * size(1, 4), kv_heads=kv_heads, head_dim=2 * size(), qk_norm=norm)
    model_spec = spec(
        layers=(DENSE, ffn),
        attention=data.draw(st.sampled_from([latent, grouped])),
        vocab=size(2, 40),
        hidden=size(),
        sequence=size(),
        micro_batch=size(1, 3),
        expert=ranks,
        mtp=data.draw(st.booleans()),
        precision=data.draw(st.sampled_from(["fp64", "fp32"])),
    )
    for layer in segments(model_spec):
        emit(layer, TARGET)


# ---------------------------------------------------------------- contents of a cut


def test_the_cut_of_attention() -> None:
    """Saved values are named after the op that produced them; the halves of `split2` are split again, not saved."""
    attention = cut(segment("attention"))
    assert [b.name for b in attention.saved] == [
        "rmsnorm_0",
        "rmsnorm_0_rstd",
        "linear_0",
        "rmsnorm_1",
        "rmsnorm_1_rstd",
        "linear_1",
        "linear_2",
        "rmsnorm_2",
        "rmsnorm_2_rstd",
        "linear_3",
        "mla_attention_0",
        "mla_attention_0_lse",
    ]
    assert {b.name for b in attention.deferred} == {
        "d_rmsnorm_0",
        "d_rmsnorm_1",
        "d_rmsnorm_2",
        "d_linear_0",
        "d_linear_1",
        "d_linear_2",
        "d_linear_3",
    }
    assert "d_y" in attention.W.args and "d_linear_4" not in attention.W.args, "the last linear's is the tangent itself"
    assert emit(segment("attention"), TARGET).source.count("linear_2[:, 0:9]") == 3, "a view in F, I and W"


def test_the_cut_of_grouped_queries() -> None:
    """The fused QKV product is kept once; queries, keys and values are columns of it, keys and values also together."""
    attention = segments(GROUPED)[1]
    saved = [b.name for b in cut(attention).saved]
    normed = ["head_rmsnorm_0", "head_rmsnorm_0_rstd", "head_rmsnorm_1", "head_rmsnorm_1_rstd"]
    assert saved == ["rmsnorm_0", "rmsnorm_0_rstd", "linear_0", *normed, "gqa_attention_0", "gqa_attention_0_lse"]
    assert {b.name for b in cut(attention).deferred} == {
        "d_rmsnorm_0",
        "d_linear_0",
        "d_head_rmsnorm_0",
        "d_head_rmsnorm_1",
    }
    source = emit(attention, TARGET).source
    assert source.count("linear_0[:, 0:24]") == source.count("linear_0[:, 24:40]") == 3, "views in F, I and W"


def test_an_op_with_a_kernel_at_some_sizes_only() -> None:
    """The norm of 16,386 columns has none: its name is the op's, the small ones' are not."""
    attention = next(s for s in segments(spec(hidden=16_386, precision="fp32")) if s.kind == "attention")
    source = emit(attention, TARGET).source
    assert "rmsnorm_0, rmsnorm_0_rstd = rmsnorm(" in source and "rmsnorm_1, rmsnorm_1_rstd = rmsnorm_d7(" in source


def test_aliases() -> None:
    kinds = ("attention", "router", "join", "final_norm")
    attention, router, join, final_norm = (cut(segment(kind)) for kind in kinds)
    assert {b.name: b.alias for b in attention.outputs} == {"entered": "h", "y": ""}
    assert {b.name: b.alias for b in router.gradients} == {"d_h": "", "d_y": "d_h"}
    assert {b.name: b.alias for b in join.gradients} == {"d_h": "d_y", "d_shared": "d_y", "d_rows": ""}
    assert {b.name: b.alias for b in final_norm.outputs} == {"y": "", "y_mtp": "y"}


def test_segments_without_input_or_weight_gradients() -> None:
    embed, join = cut(segment("embed")), cut(segment("join"))
    assert ir.Signature() == embed.I and embed.W.args == ("g_table", "tokens", "d_y")
    assert ir.Signature() == join.W and join.I.returns == ("d_h", "d_shared", "d_rows")


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_every_cut_is_closed(kind: str) -> None:
    """I and W read only their arguments, W reads no weights, and every saved value is read."""
    layer = segment(kind)
    segment_cut = cut(layer)
    params = {param.name for param in layer.params}
    inputs, outputs = {i.name for i in layer.inputs}, {o.name for o in layer.outputs}
    saved, deferred = {b.name for b in segment_cut.saved}, {b.name for b in segment_cut.deferred}
    tangents = {f"d_{o.name}" for o in layer.outputs if o.grad}
    accumulators = {f"g_{param.name}" for param in layer.params if param.grad}
    assert len(inputs | outputs | params) == len(layer.inputs) + len(layer.outputs) + len(layer.params)
    assert (
        ir.Signature(
            (*(p.name for p in layer.params), *(i.name for i in layer.inputs)),
            (*(o.name for o in layer.outputs), *(b.name for b in segment_cut.saved)),
        )
        == segment_cut.F
    )
    assert set(segment_cut.I.args) <= params | inputs | outputs | saved | tangents
    assert set(segment_cut.W.args) <= accumulators | inputs | outputs | saved | tangents | deferred
    assert (
        saved <= {*segment_cut.I.args, *segment_cut.W.args}
        and deferred <= set(segment_cut.W.args)
        and accumulators <= set(segment_cut.W.args)
    )
    assert segment_cut.I.returns == (
        *(f"d_{i.name}" for i in layer.inputs if i.grad),
        *(b.name for b in segment_cut.deferred),
    )
    names = saved | deferred
    assert all(name.isidentifier() and not name.startswith("split2") for name in names)


def test_rows_that_are_received_are_counted_by_row() -> None:
    experts = cut(next(s for s in segments(deepseek_v3()) if s.kind == "experts"))
    assert {b.name: b.row_bytes for b in experts.saved} == {"grouped_linear_0": 4096 * 2, "gated_swiglu_0": 2048 * 2}
    assert all(b.fixed_bytes == 0 for b in (*experts.saved, *experts.deferred))


# ---------------------------------------------------------------- costs


def test_published_flops() -> None:
    """DeepSeek-V3 spends 250 GFLOP a token: three times the forward of the main model (arXiv 2505.09343, table 2)."""
    model_spec = deepseek_v3()
    *main, end = model_blocks(model_spec)
    head = [step for step in end.steps if isinstance(step, ir.Use) and not step.site.startswith("M0")]
    total = sum(forward_flops(block) for block in main) + forward_flops(replace(end, steps=tuple(head)))
    assert 3 * total / model_spec.train.sequence == pytest.approx(250e9, rel=0.01)


def test_matrix_products_cost_the_same_three_times() -> None:
    """All but a thousandth of the experts' work is GEMMs: forward, input gradient and weight gradient."""
    costs = dict(cut(next(s for s in segments(deepseek_v3()) if s.kind == "experts")).costs)
    forward = 2 * (3 * 7168 * 2048)
    assert costs["W"].flops_row == forward
    for phase in "FI":
        assert forward < costs[phase].flops_row < 1.001 * forward
    weights = 4 * 3 * 7168 * 2048 * 2
    assert (costs["F"].bytes, costs["W"].bytes) == (
        pytest.approx(weights, rel=1e-4),
        pytest.approx(2 * weights, rel=1e-4),
    )


def test_every_rule_is_used() -> None:
    """Each rule is used by some layer, or as the gradient of a rule that is."""
    placed = spec().model_copy(update={"parallel": spec().parallel.model_copy(update={"placement": "experts.json"})})
    activations = [Dense(inner=10, activation=activation) for activation in get_args(Act)] + [
        Dense(inner=10, clamp=Clamp(limit=1))
    ]
    mixtures = [moe(activation=dense.activation, clamp=dense.clamp, shared_gate=True) for dense in activations]
    scores = ("sigmoid", "sqrt_softplus")
    extra = moe(score=scores[1]), moe(bias=True)
    options = spec((*activations, *mixtures, *extra), embedding_scale=2, logit_cap=1)
    by_table = [moe(choice="table", groups=1, top_groups=1, balance=Balance(), score=score) for score in scores]
    indexer = Indexer(heads=2, head_dim=8, top_k=2)
    windowed = gqa(bias="qkv", scale=0.3, window=3)
    gated = spec((*by_table,), attention=gqa(output_gate=True))
    in_context = (spec(), GROUPED, placed, options, SPLIT, SLICED, STREAMS, spec(attention=windowed), gated)
    not_in_context = [spec(attention=deltanet("head")), spec(attention=deltanet("channel"))]
    not_in_context += [
        spec(attention=compressed(compress=compression)) for compression in (Hca(rate=4), Csa(rate=4, indexer=indexer))
    ]
    not_in_context += [spec(attention=mla(indexer=indexer))]
    not_in_context += [
        padded(clipped(spec(tuple(moe(score=score) for score in scores)))),
        with_rewards(spec(mtp=False), iterations=2),
    ]
    not_in_context += [clipped(spec(attention=attention)) for attention in (mla(), gqa(), windowed)]
    ops = {
        node.op
        for model_spec in (
            *in_context,
            *(parallel(context_spec, context=2) for context_spec in in_context),
            *not_in_context,
        )
        for s in segments(model_spec)
        for node in interpret(replace(s, fused=())).nodes
    }
    assert set(RULES) - ops == {"split2"}, "its halves are views in the graph"


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("kind", sorted(LAYERS))
def test_emitted_text(kind: str) -> None:
    """Three plain functions and imports of torch and of the ops that are called; the same text every time."""
    code = emit(segment(kind), TARGET)
    tree = ast.parse(code.source)
    bindings = {ast.unparse(s.targets[0]): s.value.args[2].id for s in tree.body if isinstance(s, ast.Assign)}
    imports = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.Assign)]
    assert [f.name for f in tree.body if isinstance(f, ast.FunctionDef)] == ["F", "I", "W"]
    assert {ast.unparse(node).split(" import ")[0] for node in imports} <= {
        "import torch",
        "from runtime.build.kernels",
        "from runtime.ops",
    }
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    called = {ast.unparse(n.func) for f in functions for n in ast.walk(f) if isinstance(n, ast.Call)}
    assert {bindings.get(op, op) for op in called if not op.startswith("torch.")} == set(code.ops)
    assert bindings.keys() <= called, "a kernel that nothing calls"
    assert max(map(len, code.source.splitlines())) <= 120 and code.source.isascii()
    assert emit(segment(kind), TARGET) == code


def test_a_module_begins_with_the_dtype_of_its_activations() -> None:
    """Not with the dtype of token ids or of row counts."""
    for kind in ("embed", "mtp_input", "experts", "attention"):
        joint = interpret(segment(kind))
        head, *_ = printer.module(joint, split(joint), no_kernels).splitlines()
        assert head.startswith(f"# constructed by dsc: segment {kind}, ") and head.endswith(", float64"), head


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("linear_wide(x, weight)", "linear_wide(h, weight)"),
        ("2.5)", "2.4)"),
        ("order, 3, d_x, ", "order, 3, d_residual, "),
        ("return d_add_0, d_add_0, d_linear_wide_0", "return d_add_0, d_linear_wide_0, d_add_0"),
        ("    linear_wide_wgrad_(g_weight, d_linear_wide_0, x)\n", ""),
        ("def W(\n    g_norm,", "def W(\n    g_weight,"),
    ],
)
def test_text_that_differs_from_the_graph_is_refused(before: str, after: str) -> None:
    joint = interpret(segment("router"))
    parts = split(joint)
    source = printer.module(joint, parts, no_kernels)
    check.text(source, joint, parts, no_kernels)
    assert before in source
    with pytest.raises(AssertionError):
        check.text(source.replace(before, after), joint, parts, no_kernels)


def test_kernels_are_bound_by_their_sizes() -> None:
    """An op has a kernel file for each width it meets in FP32, and every call names the file of its operands."""
    attention = next(s for s in segments(quickstart_sized()) if s.kind == "attention")
    code = emit(attention, TARGET)
    widths = {p.name: p.shape[0] for p in attention.params if p.name.endswith("norm")}
    norms = {name for name, _ in code.kernels if "attention" not in name}
    gradient = f"norm_gradient_d{widths['norm']}_float32"
    assert norms == {gradient, *(f"rmsnorm_d{width}_float32" for width in widths.values())}
    for name, width in widths.items():
        assert re.search(rf"rmsnorm_d{width}\(\w+, {name}, ", code.source), name
        assert f"rmsnorm_wgrad_d{width}_(g_{name}, " in code.source


SCRIPT = """
import hashlib, sys
from compiler.model.segments import printer
from compiler.model.segments.split import split
from compiler.plan.parameters import parameters
from compiler.plan.blocks import cut_model
from compiler.plan.stages import build_stages
from compiler.model.segments.interpret import cut, interpret
from compiler import ir
from tests.compiler.model.segments.specs import quickstart_sized
from tests.runtime.step.specs import with_rewards
of = quickstart_sized()
text = [repr(parameters(of))]
for stage in build_stages(cut_model(of), 2):
    text.append(repr((stage.records, stage.tangents, stage.loads, stage.input, stage.output)))
    for step in stage.steps:
        if isinstance(step, ir.Use):
            joint = interpret(step.segment)
            source = printer.module(joint, split(joint), lambda node: None)
            text += [repr(cut(step.segment)), printer.module_name(step.segment), source]
assert "torch" not in sys.modules
print(hashlib.sha256("".join(text).encode()).hexdigest())
"""


def test_planning_is_deterministic_and_without_torch() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_modules_of_different_constants_have_different_names() -> None:
    places = [Place(spec(layers=(ffn,)), ffn) for ffn in (moe(), moe(scale=1.0))]
    first, second = (printer.module_name(LAYERS["router"].build(place)) for place in places)
    assert first != second and first.split("_")[:3] == second.split("_")[:3] == ["router", "T16", "D12"]
