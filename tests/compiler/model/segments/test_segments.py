"""Emitted segments against autograd over plain torch, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiler import ir
from compiler.model.layers import LAYERS, Place
from compiler.model.segments.check import text as check_text
from compiler.model.segments.interpret import interpret
from compiler.model.segments.printer import module
from compiler.model.segments.split import split
from compiler.model.segments.unpack import quantised_parameters, unpack_tensors
from compiler.plan.blocks import model_steps
from dsl.load import load as dsl_load
from dsl.schema import (
    Balance,
    Dense,
    HeadDim,
    HyperConnections,
    LinearScaling,
    Llama3Scaling,
    Mla,
    Moe,
    Rope,
    Spec,
    YarnScaling,
)
from tests.compiler.model.segments.running import assert_equal, by_autograd, by_segment, load
from tests.compiler.model.segments.specs import DENSE, gqa, mla, moe, softmax_moe, spec
from tests.specs.shipped import SPECS

SOURCES = 2  # expert ranks in these tests

Arguments = dict[str, Tensor]


def segment_of(kind: str, model_spec: Spec, ffn: Dense | Moe | None = None, mtp: bool = False) -> ir.Segment:
    return LAYERS[kind].build(Place(model_spec, ffn or model_spec.model.layers[-1].ffn, mtp))


def arguments(segment: ir.Segment, vocab: int, rows: list[int] | None = None, seed: int = 0) -> Arguments:
    """Random parameters, inputs, tangents and (non-zero) accumulators. `rows`: received rows of each expert."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: tuple[int | str, ...]) -> Tensor:
        sizes = [sum(rows or []) if extent == "R" else extent for extent in shape]
        return torch.randn(sizes, generator=generator, dtype=torch.float64)  # type: ignore[arg-type]

    tensors = {param.name: noise(param.shape) for param in segment.params}
    by_table = segment.kind == "router" and "table" in tensors
    if by_table:
        tensors["table"] = tensors["table"].argsort(dim=1).int()
    tensors |= {f"g_{param.name}": noise(param.shape) for param in segment.params if param.grad}
    for argument in segment.inputs:
        if argument.name == "real":  # five valid tokens in each sequence of eight
            tensors["real"] = (torch.arange(int(argument.shape[0])) % 8 < 5).to(torch.int32)
        elif argument.dtype == "int32":
            tensors[argument.name] = torch.tensor(rows).cumsum(0).to(torch.int32)
        elif argument.name == "order":
            tensors[argument.name] = torch.randperm(int(argument.shape[0]), generator=generator)
        elif argument.name == "rank":
            tensors[argument.name] = torch.tensor([int(dict(segment.constants)["ranks"]) - 1])  # type: ignore[arg-type]
        elif argument.dtype == "int64":
            low = -1 if argument.name in ("targets", "tokens") and not by_table else 0
            tensors[argument.name] = torch.randint(low, vocab, argument.shape, generator=generator)  # type: ignore[arg-type]
        else:
            tensors[argument.name] = noise(argument.shape)
    shapes = {buffer.name: buffer.shape for buffer in _outputs(segment)}
    tensors |= {f"d_{output.name}": noise(shapes[output.name]) for output in segment.outputs if output.grad}
    return tensors


def _outputs(segment: ir.Segment) -> tuple[ir.Buffer, ...]:
    from compiler.model.segments.interpret import cut

    return cut(segment).outputs


def check(segment: ir.Segment, vocab: int = 31, seed: int = 0) -> None:
    operands = arguments(segment, vocab, seed=seed)
    assert_equal(by_segment(segment, load(segment), operands), by_autograd(segment, operands))


@pytest.mark.parametrize("kind", sorted(set(LAYERS) - {"experts", "dense"}))
def test_equals_autograd(kind: str) -> None:
    model_spec = {"products": spec(attention=gqa()), "streams": spec(hyper_connections=HyperConnections(streams=3))}
    check(segment_of(kind, model_spec.get(kind, spec())))


@pytest.mark.parametrize("kind", ["router", "final_norm"])
def test_in_the_mtp_block(kind: str) -> None:
    segment = segment_of(kind, spec(), mtp=True)
    assert len(segment.outputs) < len(segment_of(kind, spec()).outputs)  # no sequence loss, no second copy
    check(segment)


def test_dense() -> None:
    check(segment_of("dense", spec(), DENSE))


def test_queries_of_full_rank() -> None:
    segment = segment_of("attention", spec(attention=mla(query_rank=None)))
    assert [param.name for param in segment.params][1] == "q"
    check(segment)


@pytest.mark.parametrize("kind", ["router", "join"])
def test_without_shared_experts(kind: str) -> None:
    check(segment_of(kind, spec(), moe(shared=0)))


@pytest.mark.parametrize(
    "ffn",
    [
        moe(normalize=False, scale=1.0, groups=1, top_groups=1),
        moe(groups=8, top_groups=5),  # groups of one expert have no two best
        moe(balance=Balance(sequence_loss=1e-2)),
        softmax_moe(),
        softmax_moe(normalize=True, balance=moe().balance),
        softmax_moe(groups=8, top_groups=5, balance=Balance()),
        moe(score="sqrt_softplus"),
        moe(score="sqrt_softplus", normalize=False, balance=Balance()),
    ],
    ids=[
        *("plain", "groups of one", "without bias", "softmax", "softmax, normalised, with bias", "softmax alone"),
        *("softplus", "softplus alone"),
    ],
)
def test_router_variants(ffn: Moe) -> None:
    segment = segment_of("router", spec(), ffn)
    biased = ffn.balance.bias_rate is not None
    assert [param.name for param in segment.params] == ["norm", "weight", *(["bias"] if biased else [])]
    check(segment)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrt_softplus"])
@pytest.mark.parametrize("normalize", [False, True])
def test_experts_that_a_table_chooses(score: str, normalize: bool) -> None:
    ffn = moe(score=score, normalize=normalize, choice="table", groups=1, top_groups=1, balance=Balance())
    segment = segment_of("router", spec(), ffn)
    assert [param.name for param in segment.params] == ["norm", "weight", "table"]
    check(segment)


@pytest.mark.parametrize("qk_norm", [None, "head", "width"])
def test_grouped_queries(qk_norm: str | None) -> None:
    segment = segment_of("attention", spec(attention=gqa(qk_norm=qk_norm)))
    norms = ["q_norm", "k_norm"] if qk_norm else []
    assert [param.name for param in segment.params] == ["norm", "qkv", *norms, "out"]
    check(segment)


LINEAR = LinearScaling(factor=4.0)
LLAMA3 = Llama3Scaling(factor=8.0, original=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = YarnScaling(factor=40.0, original=16, mscale=0.7, mscale_all_dim=1.0)


def rope(**changes: Any) -> Rope:
    return Rope(**({"theta": 100.0} | changes))


GROUPED = {
    "biases of queries, keys and values": (gqa(bias="qkv"), {"qkv_bias"}),
    "all biases": (gqa(bias="all", qk_norm=None), {"qkv_bias", "out_bias"}),
    "a scale": (gqa(scale=0.3), set()),
    "no position": (gqa(rope=None), set()),
    "no position, a scale": (gqa(rope=None, scale=0.3), set()),
    "half of a head": (gqa(head_dim=8, rope=rope(width=4)), set()),
    "linear": (gqa(head_dim=8, rope=rope(scaling=LINEAR)), set()),
    "llama3": (gqa(head_dim=8, rope=rope(scaling=LLAMA3)), set()),
    "yarn of half a head": (gqa(head_dim=16, rope=rope(scaling=YARN, width=8)), set()),
    "a window": (gqa(window=3), set()),
    "a window of one": (gqa(window=1), set()),
    "a window longer than the sequence": (gqa(window=99), set()),
    "sinks": (gqa(sinks=True), {"sinks"}),
    "a softcap": (gqa(softcap=1.5), set()),
    "everything": (
        gqa(bias="all", qk_norm="width", scale=0.3, window=3, sinks=True, softcap=1.5, rope=rope(scaling=YARN)),
        {"qkv_bias", "out_bias", "sinks"},
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_options_of_grouped_query_attention(name: str) -> None:
    attention, added = GROUPED[name]
    segment = segment_of("attention", spec(attention=attention))
    assert {param.name for param in segment.params} - {"norm", "qkv", "q_norm", "k_norm", "out"} == added
    check(segment)


@pytest.mark.parametrize(
    "attention",
    [
        mla(scale=0.3),
        mla(rope=None),
        mla(rope=None, scale=0.3),
        mla(rope=rope(scaling=LINEAR)),
        mla(query_rank=None, rope=rope(scaling=YARN)),
        mla(rope=rope(scaling=YarnScaling(factor=4.0, original=16, attention_factor=1.3)), scale=0.3),
    ],
    ids=["a scale", "no position", "no position, a scale", "linear", "yarn", "yarn, both factors"],
)
def test_options_of_latent_attention(attention: Mla) -> None:
    check(segment_of("attention", spec(attention=attention)))


def test_plain_attention_needs_no_separate_rotation() -> None:
    """Neither plain RoPE nor its absence needs an extra op, nor does the default scale width**-0.5."""
    for attention in (gqa(), gqa(rope=None), gqa(scale=0.5), gqa(rope=rope(width=4)), mla(), mla(rope=None)):
        nodes = interpret(segment_of("attention", spec(attention=attention))).nodes
        assert not {"rotate", "rotate_dgrad", "bounded_attention"} & {node.op for node in nodes}, attention


def test_targets_that_are_not_valid_have_no_loss() -> None:
    segment = segment_of("head", spec())
    operands = arguments(segment, 31) | {"targets": torch.full((16,), -1)}
    result = by_segment(segment, load(segment), operands)
    assert result.outputs["loss"] == 0 and not result.gradients["d_h"].any()
    assert torch.equal(result.gradients["g_head"], operands["g_head"])


@pytest.mark.parametrize(
    "rows",
    [
        [7, 2, 3, 7],
        [0, 0, 4, 0],  # experts without rows
        [0, 1, 0, 0],
        [0] * 4,  # R = 0
    ],
)
def test_experts_for_any_number_of_rows(rows: list[int], experts: tuple[ir.Segment, dict]) -> None:
    segment, functions = experts
    operands = arguments(segment, 31, rows, seed=sum(rows))
    result = by_segment(segment, functions, operands)
    assert_equal(result, by_autograd(segment, operands))
    idle = [e for e in range(4) if not sum(rows[e::4])]
    for name in ("g_up", "g_down"):
        for e in range(4):
            assert torch.equal(result.gradients[name][e], operands[name][e]) == (e in idle)


@pytest.fixture(scope="module")
def experts() -> tuple[ir.Segment, dict]:
    """One emitted module for every R: eight experts on two ranks, four here."""
    segment = segment_of("experts", spec(expert=SOURCES))
    return segment, load(segment)


def test_values_passed_through_are_the_same_tensor() -> None:
    model_spec = spec()
    attention, final_norm, join = (segment_of(kind, model_spec) for kind in ("attention", "final_norm", "join"))
    operands = arguments(attention, 31)
    assert by_segment(attention, load(attention), operands).outputs["entered"] is operands["h"]
    outputs = by_segment(final_norm, load(final_norm), arguments(final_norm, 31)).outputs
    assert outputs["y"] is outputs["y_mtp"]
    operands = arguments(join, 31)
    gradients = by_segment(join, load(join), operands).gradients
    assert gradients["d_h"] is operands["d_y"] and gradients["d_shared"] is operands["d_y"]


@settings(max_examples=12)
@given(
    heads=st.integers(1, 3),
    query_rank=st.one_of(st.none(), st.integers(1, 6)),
    kv_rank=st.integers(1, 6),
    nope=st.integers(1, 5),
    rope=st.integers(1, 3).map(lambda half: 2 * half),
    value=st.integers(1, 5),
    hidden=st.integers(1, 9),
    sequence=st.integers(1, 7),
    micro_batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_attention_of_any_size(
    heads: int,
    query_rank: int | None,
    kv_rank: int,
    nope: int,
    rope: int,
    value: int,
    hidden: int,
    sequence: int,
    micro_batch: int,
    seed: int,
) -> None:
    attention = mla(
        heads=heads, query_rank=query_rank, kv_rank=kv_rank, head_dim=HeadDim(nope=nope, rope=rope, value=value)
    )
    model_spec = spec(attention=attention, hidden=hidden, sequence=sequence, micro_batch=micro_batch)
    check(segment_of("attention", model_spec), seed=seed)


@settings(max_examples=12)
@given(
    kv_heads=st.integers(1, 3),
    r=st.integers(1, 3),
    pairs=st.integers(1, 3),
    qk_norm=st.sampled_from([None, "head", "width"]),
    hidden=st.integers(1, 9),
    sequence=st.integers(1, 7),
    micro_batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_grouped_queries_of_any_size(
    kv_heads: int, r: int, pairs: int, qk_norm: str | None, hidden: int, sequence: int, micro_batch: int, seed: int
) -> None:
    attention = gqa(heads=r * kv_heads, kv_heads=kv_heads, head_dim=2 * pairs, qk_norm=qk_norm)
    model_spec = spec(attention=attention, hidden=hidden, sequence=sequence, micro_batch=micro_batch)
    check(segment_of("attention", model_spec), seed=seed)


@settings(max_examples=12)
@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    hidden=st.integers(1, 9),
    sequence=st.integers(1, 5),
    micro_batch=st.integers(1, 3),
    shared=st.integers(0, 2),
    normalize=st.booleans(),
    biased=st.booleans(),
    score=st.sampled_from(["sigmoid", "softmax"]),
    mtp=st.booleans(),
    data=st.data(),
)
def test_moe_of_any_size(
    groups: int,
    per_group: int,
    hidden: int,
    sequence: int,
    micro_batch: int,
    shared: int,
    normalize: bool,
    biased: bool,
    score: str,
    mtp: bool,
    data: st.DataObject,
) -> None:
    top_groups = data.draw(st.integers(1, groups))
    ffn = moe(
        experts=groups * per_group,
        shared=shared,
        top_k=data.draw(st.integers(1, top_groups * per_group)),
        groups=groups,
        top_groups=top_groups,
        score=score,
        normalize=normalize,
        balance=moe().balance if biased else Balance(sequence_loss=1e-2),
    )
    model_spec = spec(layers=(ffn,), hidden=hidden, sequence=sequence, micro_batch=micro_batch)
    for kind in ("router", "join", *(("shared",) if shared else ())):
        check(segment_of(kind, model_spec, mtp=mtp))


@pytest.mark.parametrize("override", ["recompute=[rmsnorm, mla_up, swiglu]", "precision=nvfp4"])
def test_lines_fit_and_are_the_graph(override: str) -> None:
    """Ops of several results with long names, as recipes of few bits have them."""
    peaks = ["cluster.node.device.fp4=4PFLOPS"]
    steps = model_steps(dsl_load(SPECS / "deepseek-v3.dsc", overrides=[override, *peaks]))
    for segment in {step.segment.key: step.segment for step in steps if isinstance(step, ir.Use)}.values():
        joint = unpack_tensors(interpret(segment))
        parts = split(joint)
        source = module(joint, parts, lambda node: f"{node.op}_c7168_bfloat16")
        check_text(source, joint, parts, lambda node: f"{node.op}_c7168_bfloat16")
        assert max(map(len, source.splitlines())) <= 120


@pytest.mark.parametrize(("precision", "parts"), [("fp8_block", 2), ("mxfp8", 2), ("nvfp4", 3)])
def test_products_of_few_bits_read_copies_of_their_weights(precision: str, parts: int) -> None:
    """Backwards read the transposed copies. Scales are powers of 2 where tiles are recut, so recutting is exact."""
    steps = model_steps(dsl_load(SPECS / "quickstart.dsc", overrides=[f"precision={precision}"]))
    exact, read = set[str](), set[str]()
    for segment in {step.segment.key: step.segment for step in steps if isinstance(step, ir.Use)}.values():
        joint = interpret(segment)
        copies = {
            tensor.name
            for group in quantised_parameters(joint)
            for tensor in group.tensors
            if not tensor.name.endswith("_key")
        }
        exact |= {name for name, tensor in joint.tensors.items() if "pow2" in tensor.dtype and name.endswith("_fp8")}
        for node in unpack_tensors(joint).nodes:
            if read_copies := [arg for arg in node.args if arg in copies]:
                assert len(read_copies) == parts and {name.endswith("_t") for name in read_copies} == {
                    "_dgrad" in node.op
                }
                read |= {*read_copies}
        assert copies <= read
    assert exact == ({"mla_attention_0_fp8"} if precision == "fp8_block" else set())
