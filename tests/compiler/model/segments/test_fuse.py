"""Fusion: rewrites that must and must not happen, bit-identical results, and the predicted savings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.emit.segment_cache import emit
from compiler.ir import Input, Output, Segment
from compiler.model.layers import LAYERS
from compiler.model.ops import Tensor
from compiler.model.segments.fuse import fuse_ops
from compiler.model.segments.interpret import interpret
from compiler.model.segments.joint import Joint, OpNode
from compiler.model.segments.node_costs import bytes_saved
from compiler.model.segments.passes import PASSES, Pass
from compiler.model.segments.split import phases, split
from compiler.plan.plan import make_plan
from dsl.load import load as load_spec
from dsl.rules.precision import unfused_ops_exist
from dsl.schema import Dense, Gqa, Mla, Moe, Spec
from dsl.schema.run import Fusion
from runtime.ops import OPS
from tests.compiler.model.segments.running import TARGET, by_segment, load
from tests.compiler.model.segments.specs import DENSE, gqa, mla, moe, softmax_moe, spec
from tests.compiler.model.segments.test_bf16 import rounded_arguments
from tests.compiler.model.segments.test_recompute import again, segments
from tests.compiler.model.segments.test_segments import arguments
from tests.specs.shipped import NAMES, path_of

MODELS = {
    "V3": spec(),
    "without shared experts": spec(layers=(DENSE, moe(shared=0))),
    "softmax, grouped queries": spec(layers=(DENSE, softmax_moe()), attention=gqa()),
    "placed": spec().model_copy(update={"parallel": spec().parallel.model_copy(update={"placement": "experts.json"})}),
}
ROWS = [3, 0, 9, 2, 16, 1, 7, 5]


def apart(segment: Segment) -> Segment:
    return replace(segment, fused=())


def with_logits(model_spec: Spec) -> Spec:
    return again(model_spec, "logits")


# ---------------------------------------------------------------- fusion


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_matches_as_often_as_a_spec_implies(name: str) -> None:
    """`fuse_ops` asserts this for each segment; here, the counts over the whole model match its layers.

    With several residual streams, no sum is next to a norm. With tensor ranks, or if context ranks project separately,
    the gradient of attention's norm is a separate op. If weights are frozen, no gradient is combined except
    the residual's, and a router that does not choose with one op permutes with another.
    """
    model_spec = load_spec(path_of(name))
    model, ops = (
        model_spec.model,
        [node.op for use in make_plan(model_spec).uses for node in interpret(use.segment).nodes],
    )
    blocks = [(model.attention_of(layer), model.ffn(layer)) for layer in range(model.num_layers)]
    blocks += [(model.attention_of_mtp, blocks[-1][1])] * (model.mtp.depth if model.mtp else 0)
    moes = [ffn for _, ffn in blocks if isinstance(ffn, Moe)]
    trained, streams = model_spec.train.only is None, model.hyper_connections is not None
    split = model_spec.parallel.tensor > 1 or model_spec.parallel.context > 1
    by_attention = ["" if isinstance(attention, Gqa) or not trained else "sum_" for attention, _ in blocks if not split]
    by_ffn = ["permuted_" if isinstance(ffn, Moe) and trained else "" for _, ffn in blocks]
    expected = Counter() if streams else Counter(by_attention + by_ffn)
    assert sum(op.startswith("add_rmsnorm") for op in ops) == (0 if streams else len(blocks))
    assert Counter(op.split("rmsnorm")[0] for op in ops if "rmsnorm" in op and op.endswith("_dgrad_add")) == expected
    one_op = not model_spec.data.pads_rows  # else padding is spread in between
    chosen = sum(one_op and ffn.choice == "scores" and ffn.score != "sqrt_softplus" for ffn in moes)
    assert (ops.count("route_permute"), ops.count("permute")) == (chosen, len(moes) - chosen)
    assert ops.count("permute_dgrad_add") == len(moes) - expected["permuted_"]
    assert ops.count("unpermute_add") == len(moes)
    assert not {"unpermute", "permute_placed", "permute_dgrad"} & {*ops}


EIGHT_BITS = load_spec(Path(__file__).parents[4] / "specs" / "deepseek-v3.dsc")


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite", "qwen3-30b-a3b"])
def test_fp8_passes_match_under_any_recomputation(name: str) -> None:
    """Passes match, and nothing is quantised, or quantised again, after a norm or an activation that could do it."""
    model_spec = load_spec(Path(__file__).parents[4] / "specs" / f"{name}.dsc")
    model_spec = model_spec.model_copy(update={"precision": EIGHT_BITS.precision})
    names = ("rmsnorm", "swiglu", "mla_up", "attention", "dense", "shared", "experts")
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            for segment in segments(again(model_spec, *chosen)).values():
                joint = interpret(segment)
                makers = {value: node.op for node in joint.nodes for value in node.outputs}
                readers = Counter(value for node in joint.nodes for value in node.reads)
                for node in joint.nodes:
                    if node.op in ("quantise", "quantise_both") and readers[node.reads[0]] == 1:
                        maker = makers.get(node.reads[0], "")
                        assert maker not in ("rmsnorm", "add_rmsnorm", "swiglu", "gated_swiglu"), (segment.kind, chosen)
                        assert not maker.endswith("swiglu_dgrad")
                    assert node.op != "unpermute_dgrad", "gradients of rows are quantised as they are copied"


BOTH, KEPT = "mla_attention_dgrad_quantise_both", "dequantise_mla_attention_dgrad"


@pytest.mark.parametrize(
    ("kept", "nope", "value", "sequence", "expected"),
    [
        ("e5m6", 128, 128, 4096, {"mla_attention_quantise_kept", f"dequantise_{BOTH}"}),
        ("e5m6", 128, 128, 4000, {"mla_attention_quantise_kept", KEPT}),  # tiles with rows of two sequences
        ("e5m6", 64, 128, 4096, {"mla_attention_quantise_kept", KEPT}),  # a tile of keys and of values
        ("e5m6", 128, 64, 4096, {"mla_attention", "mla_attention_dgrad"}),  # two heads share a tile
        (None, 128, 128, 4096, {"mla_attention", BOTH}),
        (None, 128, 128, 4000, {"mla_attention", "mla_attention_dgrad"}),
    ],
)
def test_attention_in_tiles(kept: str | None, nope: int, value: int, sequence: int, expected: set[str]) -> None:
    """Attention quantises its output if a head consists of whole tiles, and reads the kept form."""
    attention = EIGHT_BITS.model.attention
    assert isinstance(attention, Mla)
    widths = attention.head_dim.model_copy(update={"nope": nope, "value": value})
    model = EIGHT_BITS.model.model_copy(update={"attention": attention.model_copy(update={"head_dim": widths})})
    model_spec = EIGHT_BITS.model_copy(
        update={
            "model": model,
            "precision": EIGHT_BITS.precision.model_copy(update={"attention_output": kept}),
            "train": EIGHT_BITS.train.model_copy(update={"sequence": sequence}),
        }
    )
    segment = segments(model_spec)["attention"]
    assert {node.op for node in interpret(segment).nodes if "attention" in node.op} == expected
    assert {node.op for node in interpret(apart(segment)).nodes if "attention" in node.op} == {
        "mla_attention", "mla_attention_dgrad"
    }  # fmt: skip


def test_a_name_for_every_pass() -> None:
    """Passes are named by `unfused`, and one by `recompute`; some layer lists each name."""
    assert {*PASSES} == {*Fusion.__args__, "logits"} == {name for layer in LAYERS.values() for name in layer.fused}  # type: ignore[attr-defined]


def test_unfused_passes_are_left_out_of_segments() -> None:
    for name in Fusion.__args__:  # type: ignore[attr-defined]
        complete, reduced = segments(spec()), segments(spec().model_copy(update={"unfused": (name,)}))
        for kind, segment in complete.items():
            assert reduced[kind].fused == tuple(fusion for fusion in segment.fused if fusion != name)


@pytest.mark.parametrize("eight", [(), ("linear",), ("dispatch",), ("combine",), ("linear", "dispatch", "combine")])
@pytest.mark.parametrize("layers", [(DENSE, moe()), (DENSE,), (moe(shared=0),)], ids=["both", "dense", "moe"])
def test_an_unfused_name_is_refused_where_it_has_no_effect(
    eight: tuple[str, ...], layers: tuple[Dense | Moe, ...]
) -> None:
    """A name of `unfused` is refused exactly where the graphs of the segments are equal with it and without it."""
    model_spec = spec(layers=layers)
    roles = {role: "e4m3" if role in eight else "bf16" for role in ("linear", "dispatch", "combine")}
    precision = EIGHT_BITS.precision.model_copy(update=roles)
    model_spec = model_spec.model_copy(update={"precision": precision})
    complete = {kind: interpret(segment).nodes for kind, segment in segments(model_spec).items()}
    for name in Fusion.__args__:  # type: ignore[attr-defined]
        reduced = model_spec.model_copy(update={"unfused": (name,)})
        has_no_effect = complete == {kind: interpret(segment).nodes for kind, segment in segments(reduced).items()}
        assert bool([*unfused_ops_exist(reduced)]) == has_no_effect, name


GROUPED = spec(layers=(DENSE,), attention=gqa())


@pytest.mark.parametrize(
    "model_spec",
    [
        GROUPED,
        again(GROUPED, "rmsnorm"),
        again(GROUPED, "rmsnorm", "dense"),
        again(GROUPED, "rmsnorm", "attention", "dense"),
        spec().model_copy(update={"model": spec().model.model_copy(update={"hidden": 8200})}),
    ],
    ids=["a norm alone", "norms again", "norms of attention again", "all again", "too wide"],
)
def test_unfusing_the_gradient_of_a_norm_is_refused_where_it_has_no_effect(model_spec: Spec) -> None:
    reduced = model_spec.model_copy(update={"unfused": ("norm_gradient",)})
    complete_nodes, reduced_nodes = (
        [interpret(segment).nodes for segment in segments(variant).values()] for variant in (model_spec, reduced)
    )
    assert bool([*unfused_ops_exist(reduced)]) == (complete_nodes == reduced_nodes)


def test_a_pass_without_its_match_is_an_error() -> None:
    segment = segments(spec())["router"]
    joint = interpret(apart(segment))
    without = replace(joint, segment=segment, nodes=tuple(node for node in joint.nodes if node.op != "add"))
    with pytest.raises(AssertionError, match="residual_norm: 0 matches in router, not 1"):
        fuse_ops(without)
    shared = replace(interpret(apart(segments(spec())["attention"])), segment=segment)
    with pytest.raises(AssertionError, match="0 matches"):
        fuse_ops(shared)


# ---------------------------------------------------------------- nothing else changes


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("model_spec", MODELS.values(), ids=MODELS)
def test_equal_to_the_bit(model_spec: Spec, precision: str) -> None:
    """Outputs and all gradients of every segment with fused ops are bit-identical to the unfused ops."""
    from dsl.schema import BUILT_IN

    model_spec = model_spec.model_copy(update={"precision": BUILT_IN[precision]})
    for segment in (*segments(with_logits(model_spec)).values(), *segments(again(model_spec, "rmsnorm")).values()):
        if not segment.fused or segment.kind == "head":
            continue
        operands = arguments(segment, 31, ROWS)
        if "slots" in operands:
            operands["slots"] = torch.randperm(len(operands["slots"]))
        operands = rounded_arguments(segment, operands) if precision != "fp64" else operands
        fused_result, apart_result = (
            by_segment(variant, load(variant), operands) for variant in (segment, apart(segment))
        )
        for mine, theirs in (
            (fused_result.outputs, apart_result.outputs),
            (fused_result.gradients, apart_result.gradients),
        ):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs), segment.kind


def test_the_cut_keeps_its_bytes() -> None:
    """Values passed between F, I and W are the same; only temporaries inside one of them disappear."""
    for segment in segments(spec()).values():
        fused_cut, apart_cut = (split(interpret(variant)).cut for variant in (segment, apart(segment)))
        for part in ("outputs", "saved", "gradients", "deferred"):
            assert sorted(map(repr, getattr(fused_cut, part))) == sorted(map(repr, getattr(apart_cut, part)))


@settings(max_examples=12)
@given(
    query_rank=st.none() | st.integers(1, 9),
    shared=st.integers(0, 2),
    names=st.sets(st.sampled_from(["rmsnorm", "swiglu", "mla_up", "attention", "dense", "router", "shared", "logits"])),
    unfused=st.sets(st.sampled_from(["residual_norm", "route", "join", "norm_gradient"])),
)
def test_traced_and_planned_graphs_agree_for_any_choice(
    query_rank: int | None, shared: int, names: set[str], unfused: set[str]
) -> None:
    model_spec = spec(layers=(DENSE, moe(shared=shared)), attention=mla(query_rank=query_rank))
    for segment in segments(again(model_spec.model_copy(update={"unfused": tuple(sorted(unfused))}), *names)).values():
        emit(segment, TARGET)


# ---------------------------------------------------------------- the logits


def test_logits_in_blocks_are_never_a_whole_tensor() -> None:
    model_spec = spec()
    plain, blocks = (segments(variant)["head"] for variant in (model_spec, with_logits(model_spec)))
    T, V = 16, 31
    assert any(tensor.shape == (T, V) for tensor in split(interpret(plain)).cut.saved)
    cut = split(interpret(blocks)).cut
    assert all(buffer.shape != (T, V) for part in (cut.saved, cut.deferred) for buffer in part)
    assert "head" in cut.W.args, "W makes them once more, of the weight"
    joint = interpret(blocks)
    assert not any(node.op in ("linear", "cross_entropy") for node in joint.nodes)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_logits_in_blocks_give_the_results_of_whole_logits(precision: str) -> None:
    from dsl.schema import BUILT_IN

    model_spec = spec().model_copy(update={"precision": BUILT_IN[precision]})
    plain, blocks = (segments(variant)["head"] for variant in (model_spec, with_logits(model_spec)))
    operands = arguments(plain, 31)
    operands = rounded_arguments(plain, operands) if precision != "fp64" else operands
    blocks_result, plain_result = (by_segment(head, load(head), operands) for head in (blocks, plain))
    unit = 2.0**-52 if precision == "fp64" else 2.0**-23
    for mine, theirs in (
        (blocks_result.outputs, plain_result.outputs),
        (blocks_result.gradients, plain_result.gradients),
    ):
        for name, tensor in theirs.items():
            bound = 64 * unit * tensor.abs().max()  # sums of at most 31 terms, in another order
            assert (mine[name] - tensor).abs().max() <= bound, name


# ---------------------------------------------------------------- bytes


def test_bytes_saved_equal_those_counted_by_hand() -> None:
    """Saved bytes are those counted by hand, for a MoE layer: T 16, D 12, K 3, float64."""
    T, D, K, size = 16, 12, 3, 8
    tensor, gates, choices = T * D * size, T * K * size, T * K * 8
    saved = {}
    for segment in segments(spec()).values():
        saved |= {(segment.kind, node.op): saving for node, saving in bytes_saved(interpret(segment)).items()}
    assert saved["router", "add_rmsnorm"] == (tensor, 0), "the sum is not read again"
    assert saved["router", "route_permute"] == (gates + choices, 0), "gates and choices are not read again"
    assert saved["router", "permuted_rmsnorm_dgrad_add"] == (7 * tensor, 0), "three sums; dy is not read again"
    assert saved["attention", "sum_rmsnorm_dgrad_add"] == (3 * tensor, 0), "a sum; dy is not read again"
    assert saved["dense", "rmsnorm_dgrad_add"] == (2 * tensor, 0), "neither written nor read"
    assert saved["join", "unpermute_add"] == (4 * tensor, 0), "two sums, each neither written nor read"


def test_bytes_saved_with_a_norm_that_is_computed_again() -> None:
    """Neither x, nor rstd, nor the gain is read again."""
    T, D, size = 16, 12, 8
    unread = (T * D + T + D) * size
    plain, repeated = (
        {(segment.kind, node.op.replace("_again", "")): saved for segment in segments(variant).values()
         for node, saved in bytes_saved(interpret(segment)).items()}
        for variant in (spec(), again(spec(), "rmsnorm"))
    )  # fmt: skip
    names = [name for name in plain if name[1].endswith("rmsnorm_dgrad_add")]
    assert len(names) == 3 and all(repeated[name] == (plain[name][0] + unread, 0) for name in names)


def test_the_build_lists_every_call() -> None:
    for segment in segments(spec()).values():
        code = emit(segment, TARGET)
        parts = split(interpret(segment))
        nodes = [node.op for nodes in parts.functions.values() for node in nodes if node.op != "columns"]
        assert sorted(call.op for call in code.calls) == sorted(nodes)
        assert {call.kernel for call in code.calls if call.kernel} == {name for name, _ in code.kernels}
        assert sum(bool(call.parts) for call in code.calls) == len(interpret(segment).parts)
        assert all(call.op in OPS or call.op in ("add", "cat2") for call in code.calls)


# ---------------------------------------------------------------- the rewriting itself

A_B = Pass(
    find=(OpNode("a", ("x", "n"), ("y",)), OpNode("b", ("y", "z", "n"), ("w",))),
    make=(OpNode("ab", ("x", "z", "n"), ("w",)),),
    matches=lambda _: 1,
)


def graph(*nodes: OpNode, outputs: tuple[str, ...] = ("out",)) -> Joint:
    """A graph of vectors with the inputs p and q."""
    inputs = tuple(Input(name, (4,), "float32") for name in "pq")
    segment = Segment("any", lambda: (), (), inputs, tuple(Output(name) for name in outputs), fused=("test",))
    names = {name for node in nodes for name in (*node.reads, *node.outputs)}
    tensors = {name: Tensor((4,), "float32") for name in names}
    return Joint(segment, nodes, tensors, tuple((name, name) for name in outputs), (), ())


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASSES, "test", (A_B,))


@pytest.mark.usefixtures("one_pass")
def test_a_match_is_rewritten_in_place() -> None:
    before = graph(OpNode("a", ("p", 2), ("t",)), OpNode("c", ("q",), ("u",)), OpNode("b", ("t", "u", 2), ("out",)))
    after = fuse_ops(before)
    assert after.nodes == (OpNode("c", ("q",), ("u",)), OpNode("ab", ("p", "u", 2), ("out",)))
    assert after.parts == ((after.nodes[1], (before.nodes[0], before.nodes[2])),)
    assert set(phases(after).values()) == {"F"}


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize(
    "nodes",
    [
        (OpNode("a", ("p", 2), ("t",)), OpNode("b", ("t", "q", 3), ("out",))),  # another constant
        (OpNode("a", ("p", 2), ("t",)), OpNode("b", ("q", "t", 2), ("out",))),  # another place
        (
            OpNode("a", ("p", 1), ("t",)),
            OpNode("b", ("t", "q", True), ("s",)),
            OpNode("c", ("t", "s"), ("out",)),
        ),  # read
        (OpNode("a", ("p", 2), ("t",)), OpNode("a", ("q", 2), ("u",)), OpNode("b", ("p", "u", 2), ("out",))),
    ],
    ids=["constant", "place", "read by another", "of another"],
)
def test_nodes_that_do_not_match_are_not_rewritten(nodes: tuple[OpNode, ...]) -> None:
    with pytest.raises(AssertionError, match="0 matches in any, not 1"):
        fuse_ops(graph(*nodes))


@pytest.mark.usefixtures("one_pass")
def test_a_value_that_the_segment_returns_is_not_lost() -> None:
    nodes = (OpNode("a", ("p", 2), ("t",)), OpNode("b", ("t", "q", 2), ("out",)))
    with pytest.raises(AssertionError, match="0 matches"):
        fuse_ops(graph(*nodes, outputs=("out", "t")))


def test_a_sum_matches_in_either_operand_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_pass = Pass(
        (OpNode("a", ("x",), ("y",)), OpNode("add", ("y", "z"), ("w",))),
        (OpNode("az", ("x", "z"), ("w",)),),
        lambda _: 1,
    )
    monkeypatch.setitem(PASSES, "test", (sum_pass,))
    for args in (("t", "q"), ("q", "t")):
        after = fuse_ops(graph(OpNode("a", ("p",), ("t",)), OpNode("add", args, ("out",))))
        assert after.nodes == (OpNode("az", ("p", "q"), ("out",)),)
