"""Recomputation: values that F no longer saves, where they are recomputed, and bit-identical results."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler import ir
from compiler.emit.segment_cache import emit
from compiler.ir.segment import SUM
from compiler.model.layers import LAYERS
from compiler.model.segments import check, printer
from compiler.model.segments.interpret import cut, interpret
from compiler.model.segments.node_costs import costs
from compiler.model.segments.split import phases, split
from compiler.plan.blocks import cut_model, model_steps
from dsl.schema import HyperConnections, Spec
from dsl.schema.run import Recompute
from runtime.ops import OPS
from tests.compiler.model.segments.running import TARGET, assert_equal, by_autograd, by_segment, load
from tests.compiler.model.segments.specs import DENSE, deepseek_v3, gqa, mla, moe, quickstart_sized, softmax_moe, spec
from tests.compiler.model.segments.test_segments import arguments
from tests.golden.test_golden import other_versions
from tests.runtime.step.specs import spec as small_spec

NAMES = get_args(Recompute)
V3 = ("rmsnorm", "mla_up", "swiglu")  # what DeepSeek-V3 recomputes
ROWS = [3, 1, 0, 2, 4, 1, 1, 5]  # that each expert receives
CHOICES = ((), *((name,) for name in NAMES), V3, NAMES)
MODELS = {
    "V3": spec(),
    "without shared experts": spec(layers=(DENSE, moe(shared=0)), attention=mla(query_rank=None)),
    "streams": spec(layers=(DENSE, moe()), hyper_connections=HyperConnections(streams=3, rounds=3)),
    "grouped queries": spec(layers=(DENSE, softmax_moe()), attention=gqa()),
}


def again(model_spec: Spec, *names: str) -> Spec:
    return model_spec.model_copy(update={"recompute": names})


def segments(model_spec: Spec) -> dict[str, ir.Segment]:
    """The segments by kind; of routers, those of the main model."""
    uses = [step for step in reversed(model_steps(model_spec)) if isinstance(step, ir.Use)]
    return {use.segment.kind: use.segment for use in uses}


def names_of(buffers: tuple[ir.Buffer, ...]) -> set[str]:
    return {buffer.name for buffer in buffers}


def fixed(buffers: tuple[ir.Buffer, ...], rows: int = 3) -> int:
    return sum(buffer.fixed_bytes + rows * buffer.row_bytes for buffer in buffers)


# ---------------------------------------------------------------- saved values, by hand


def test_the_cut_of_latent_attention() -> None:
    """Saved are the latents, which the norms after them read, and the attention output. W gets these norms from I."""
    segment_cut = cut(segments(again(spec(), *V3))["attention"])
    assert names_of(segment_cut.saved) == {"linear_0", "linear_2", "mla_attention_0", "mla_attention_0_lse"}
    norms = {f"rmsnorm_{i}{rstd}_again" for i in range(3) for rstd in ("", "_rstd")}
    gradients = {"d_linear_0", "d_linear_1", "d_linear_2", "d_linear_3", "d_rmsnorm_0", "d_rmsnorm_1", "d_rmsnorm_2"}
    assert names_of(segment_cut.deferred) == norms | gradients


def test_the_up_projections_start_at_the_kept_norms_where_these_are_not_named() -> None:
    plain, recomputed = (cut(segments(again(spec(), *names))["attention"]) for names in ((), ("mla_up",)))
    assert names_of(plain.saved) - names_of(recomputed.saved) == {"linear_1", "linear_3"}
    assert names_of(recomputed.saved) < names_of(plain.saved) and recomputed.deferred == plain.deferred


def test_the_cuts_of_a_moe_layer() -> None:
    """The normed `x` is not saved: router and shared experts recompute it separately."""
    cuts = {kind: cut(segment) for kind, segment in segments(again(spec(), *V3)).items()}
    assert names_of(cuts["router"].saved) == {"linear_wide_0", "route_0_expert"}
    assert {"x_again", "rmsnorm_0_rstd_again"} < names_of(cuts["router"].deferred)
    assert names_of(cuts["shared"].saved) == {"linear_0"}
    assert names_of(cuts["shared"].deferred) == {"d_linear_0", "x_again"}
    for kind, residual in (("router", "residual"), ("shared", "h")):
        assert "x" not in {*cuts[kind].I.args, *cuts[kind].W.args} and residual in cuts[kind].I.args
    assert names_of(cuts["experts"].saved) == {"grouped_linear_0"}, "what came from elsewhere is an input and kept"
    assert names_of(cuts["experts"].deferred) == {"d_grouped_linear_0"}


def test_the_ends_of_the_model() -> None:
    cuts = {kind: cut(segment) for kind, segment in segments(again(spec(), *V3)).items()}
    assert names_of(cuts["mtp_input"].saved) == {"embedding_0"}, "neither the norms nor their columns side by side"
    assert names_of(cuts["dense"].saved) == {"add_0", "linear_0"}, (
        "the residual stream is kept, as its two parts are not"
    )
    assert names_of(cuts["final_norm"].saved) == {"rmsnorm_0_rstd"}, "its output is the head's input"
    plain_cuts = {kind: cut(segment) for kind, segment in segments(spec()).items()}
    assert all(cuts[kind] == plain_cuts[kind] for kind in ("embed", "final_norm", "head", "join"))


def test_grouped_queries() -> None:
    """Queries and keys are normed again; the fused QKV product is saved: the inputs of the norms, and the values."""
    segment_cut = cut(segments(again(MODELS["grouped queries"], "rmsnorm"))["attention"])
    assert names_of(segment_cut.saved) == {"linear_0", "gqa_attention_0", "gqa_attention_0_lse"}
    plain = cut(segments(again(spec(attention=gqa(qk_norm=None)), "rmsnorm"))["attention"])
    assert names_of(plain.saved) == {"linear_0", "gqa_attention_0", "gqa_attention_0_lse"}


@pytest.mark.parametrize("kind", ["attention", "dense", "router", "shared", "experts"])
def test_a_wholly_recomputed_segment_saves_nothing(kind: str) -> None:
    model_spec = MODELS["without shared experts"] if kind == "router" else spec()
    """But for the sum with the residual stream, which is less than its parts."""
    assert names_of(cut(segments(again(model_spec, kind))[kind]).saved) == ({"add_0"} if kind == "dense" else set())


def test_values_that_only_w_needs_are_recomputed_in_w() -> None:
    """Unless it is made of what I makes again: then W gets the end of the chain, and not its beginning."""
    for kind, op in (("dense", "swiglu"), ("experts", "gated_swiglu"), ("shared", "swiglu")):
        segment = segments(again(spec(), "swiglu"))[kind]
        joint = interpret(segment)
        op_phases = [phase for index, phase in phases(joint).items() if joint.nodes[index].op == op]
        assert sorted(op_phases) == ["F", "W"]
    segment_cut = cut(segments(again(spec(), "experts"))["experts"])
    assert names_of(segment_cut.deferred) == {"d_grouped_linear_0", "gated_swiglu_0_again"}


def test_memory_of_deepseek_v3() -> None:
    """Elements per token and MoE layer that F saves besides the layer's inputs: from 101,636 in BF16 to a third."""
    plain, recomputed = (segments(again(deepseek_v3(), *names)) for names in ((), V3))
    attention = {
        name: fixed(cut(by_kind["attention"]).saved) / 4096
        for name, by_kind in (("plain", plain), ("made", recomputed))
    }
    latents, heads, statistics = 1536 + 512 + 64, 128 * 128, 4 * 128
    assert attention["made"] == 2 * (latents + heads) + statistics
    norms, ups = 7168 + 1536 + 512, 128 * 192 + 128 * 256
    assert attention["plain"] - attention["made"] == 2 * (norms + ups) + 3 * 4
    experts = [fixed(cut(by_kind["experts"]).saved, rows=1) for by_kind in (plain, recomputed)]
    assert experts == [2 * (4096 + 2048), 2 * 4096]


# ---------------------------------------------------------------- nothing else changes


@pytest.mark.parametrize("names", CHOICES[1:], ids=" ".join)
@pytest.mark.parametrize("model_spec", MODELS.values(), ids=MODELS)
def test_equal_to_the_bit(model_spec: Spec, names: tuple[str, ...]) -> None:
    """Outputs and all gradients equal those of segments that save everything, and nearly autograd's. `emit`, which
    loads them, compares the base graph with a trace."""
    plain, chosen = segments(model_spec), segments(again(model_spec, *names))
    for kind, segment in chosen.items():
        if not segment.recompute:
            assert segment.key == plain[kind].key and cut(segment) == cut(plain[kind]), "traced and printed as ever"
            continue
        operands = arguments(segment, 31, ROWS)
        for remade in segment.remade:
            if remade.value in operands:
                args = (operands[arg] if isinstance(arg, str) else arg for arg in remade.args)
                results = OPS[remade.op](*args)
                operands[remade.value] = results[0] if isinstance(results, tuple) else results
        again_result, plain_result = (
            by_segment(variant, load(variant), operands) for variant in (segment, plain[kind])
        )
        for mine, theirs in (
            (again_result.outputs, plain_result.outputs),
            (again_result.gradients, plain_result.gradients),
        ):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs), kind
        assert_equal(again_result, by_autograd(segment, operands))


def test_experts_without_rows() -> None:
    segment = segments(again(spec(), "swiglu"))["experts"]
    operands = arguments(segment, 31, [0] * 8)
    assert_equal(by_segment(segment, load(segment), operands), by_autograd(segment, operands))


@pytest.mark.parametrize("model_spec", [quickstart_sized(), deepseek_v3("fp32")], ids=["quickstart", "DeepSeek-V3"])
def test_recomputation_uses_the_same_kernels(model_spec: Spec) -> None:
    """Except gradients of norms, which are fused with the recomputation."""
    model_spec = model_spec.model_copy(update={"unfused": ("norm_gradient",)})
    for kind, segment in segments(again(model_spec, *V3)).items():
        assert emit(segment, TARGET).kernels == emit(segments(model_spec)[kind], TARGET).kernels or kind == "shared"


def test_an_embedding_moves_only_the_rows_of_its_tokens() -> None:
    """F reads indices and rows, and writes rows; W reads rows and rows of gradients, and writes the latter."""
    joint = interpret(segments(spec())["embed"])
    tokens, width = joint.tensors["y"].shape
    assert isinstance(tokens, int) and isinstance(width, int) and joint.tensors["y"].dtype == "float64"
    moved_bytes = {phase: work.bytes for phase, work in costs(joint)}
    assert moved_bytes == {"F": 8 * tokens * (1 + 2 * width), "I": 0, "W": 8 * tokens * (1 + 3 * width)}


@pytest.mark.parametrize("model_spec", MODELS.values(), ids=MODELS)
def test_work_that_is_done_again(model_spec: Spec) -> None:
    """F is unchanged. I and W additionally recompute a part of F, at its cost; W reads no weight."""
    for names in CHOICES:
        for kind, segment in segments(again(model_spec, *names)).items():
            joint, plain = (interpret(replace(variant, fused=())) for variant in (segment, segments(model_spec)[kind]))
            before, after = dict(costs(plain)), dict(costs(joint))
            assert after["F"] == before["F"]
            assert all(Counter(before[phase].ops) <= Counter(after[phase].ops) for phase in "IW")
            extra = sum((Counter(after[phase].ops) - Counter(before[phase].ops) for phase in "IW"), Counter())
            if kind == "shared":  # the norm of its input was the router's
                extra -= Counter(work for work in extra if work[0] == "rmsnorm")
            assert extra <= Counter(before["F"].ops)
            assert bool(joint.recomputed) == any(after[phase] != before[phase] for phase in "IW")
            assert not {param.name for param in segment.params} & {*split(joint).cut.W.args}


@settings(max_examples=20)
@given(st.sampled_from(sorted(MODELS)), st.sets(st.sampled_from(NAMES)), st.sampled_from(NAMES))
def test_a_name_more_keeps_no_byte_more(model_spec: str, names: set[str], name: str) -> None:
    fewer, further = (segments(again(MODELS[model_spec], *chosen)) for chosen in (names, names | {name}))
    for kind in fewer:
        fewer_cut, further_cut = cut(fewer[kind]), cut(further[kind])
        assert names_of(further_cut.saved) <= names_of(fewer_cut.saved)
        assert fewer_cut.F.returns[: len(fewer_cut.outputs)] == further_cut.F.returns[: len(fewer_cut.outputs)]


@settings(max_examples=8)
@given(
    heads=st.integers(1, 4),
    query_rank=st.none() | st.integers(1, 9),
    inner=st.integers(1, 9),
    shared=st.integers(0, 2),
    expert=st.sampled_from([1, 2, 4]),
    grouped=st.booleans(),
    names=st.sets(st.sampled_from(NAMES), min_size=1),
)
def test_cuts_agree_for_any_size(
    heads: int, query_rank: int | None, inner: int, shared: int, expert: int, grouped: bool, names: set[str]
) -> None:
    attention = gqa(heads=2 * heads, kv_heads=heads) if grouped else mla(heads=heads, query_rank=query_rank)
    model_spec = spec(layers=(DENSE, moe(inner=inner, shared=shared)), attention=attention, expert=expert)
    for segment in segments(again(model_spec, *names)).values():
        emit(segment, TARGET)


# ---------------------------------------------------------------- names and text


def over(model_spec: Spec, **ranks: int) -> Spec:
    """A spec of as many tensor or context ranks."""
    return model_spec.model_copy(update={"parallel": model_spec.parallel.model_copy(update=ranks)})


def test_a_layer_lists_exactly_the_names_that_change_its_segments() -> None:
    """A segment that is forced to a name changes if, and only if, its layer lists the name; for every kind and name."""
    for kind, layer in LAYERS.items():
        changed = set()
        in_two = [over(model_spec, context=2) for model_spec in MODELS.values()]
        for model_spec in (*MODELS.values(), *in_two, over(MODELS["streams"], tensor=2)):
            for name in NAMES:
                built = segments(again(model_spec, name)).get(kind)
                assert built is None or built.recompute == ((name,) if name in layer.recompute else ())
                if built and (interpret(replace(built, recompute=(name,))).recomputed or name in built.fused):
                    changed.add(name)
        assert changed == set(layer.recompute) - {SUM}, kind  # which only has an effect together with the whole segment


def test_keys() -> None:
    """Keys depend on the set of recomputed names, not their order; without names the key is the plain one."""
    ordered, reversed_, none = (segments(again(spec(), *names))["attention"] for names in (V3, V3[::-1], ()))
    assert ordered.key == reversed_.key != none.key and none.emitted_key == (*none.emitted_key[:5], none.fused)
    assert printer.module_name(ordered) != printer.module_name(none)


@pytest.mark.skipif(bool(other_versions()), reason="goldens are of the versions in constraints.txt")
@pytest.mark.parametrize("kind", ["attention", "experts", "mtp_input", "router", "shared"])
def test_text_is_the_golden_one(kind: str, bless: bool) -> None:
    """The quickstart's segments with DeepSeek-V3's recomputation match the golden text."""
    path = Path(__file__).parents[3] / "golden" / "recompute" / f"{kind}.py"
    source = emit(segments(again(quickstart_sized(), *V3))[kind], TARGET).source
    if bless:
        path.write_text(source, "utf-8")
    assert path.read_text("utf-8") == source


def test_text() -> None:
    """The recomputation is in the function that reads it, with a comment that names it."""
    attention = emit(segments(again(spec(), *V3))["attention"], TARGET).source
    assert "# recompute: rmsnorm, mla_up\n" in attention
    _, forward, inward, outward = re.split(r"\ndef [FIW]\(", attention)
    assert "_again" not in forward and "_again: what F had, computed again." in inward
    assert inward.index("linear_1_again = linear(rmsnorm_1_again, q_up)") < inward.index("mla_attention_dgrad(\n")
    assert "linear_wgrad_(g_kv_up, d_linear_3, rmsnorm_2_again)" in outward and "computed again" not in outward
    dense = emit(segments(again(spec(), *V3))["dense"], TARGET).source
    assert "swiglu_0_again = swiglu(linear_0)" in dense[dense.index("def W(") :]
    joint = interpret(segments(again(spec(), *V3))["attention"])
    parts = split(joint)
    source = printer.module(joint, parts, lambda _: None)
    check.text(source, joint, parts, lambda _: None)
    with pytest.raises(AssertionError):
        check.text(
            source.replace("linear(rmsnorm_1_again, q_up)", "linear(linear_0, q_up)"), joint, parts, lambda _: None
        )


@pytest.mark.parametrize("model_spec", ["v3", "pattern"])
def test_segments_of_context_ranks_with_any_names(model_spec: str) -> None:
    """Each fusion pass matches as often as a segment declares, for any recomputed names."""
    names = ("rmsnorm", "mla_up", "attention", "router", "shared", "experts", "swiglu", "dense")
    small = small_spec(1, 1, 1, 2, of=model_spec, schedule="1f1b", context=2, sequence=8)
    for count in range(4):
        for chosen in combinations([name for name in names if model_spec == "v3" or name != "mla_up"], count):
            cut_model(small.model_copy(update={"recompute": chosen}))
