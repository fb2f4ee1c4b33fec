"""Values that segments keep and send under FP8 and other recipes, against lists by hand (arXiv 2412.19437, §3.3)."""

from __future__ import annotations

import pytest

from compiler import ir
from compiler.ir.dtypes import is_packed, parse_packed, tensor_bytes, transpose_tiles
from compiler.model.segments.interpret import cut, interpret
from compiler.model.segments.split import split
from compiler.model.segments.storage import PRODUCTS
from compiler.model.segments.unpack import unpack_tensors
from compiler.plan.blocks import model_steps
from dsl.load import load
from dsl.schema import BUILT_IN, Spec
from tests.specs.shipped import SPECS

T, D, S = 4096, 7168, 8 * 4096  # tokens of a micro-batch, hidden, routed rows
TILE = 1 + 4 / 128  # bytes of an element with its share of a scale


def deepseek(*overrides: str) -> Spec:
    return load(SPECS / "deepseek-v3.dsc", overrides=overrides)


def use_of(spec: Spec, kind: str) -> ir.Use:
    """The first use of a block of the kind."""
    return next(step for step in model_steps(spec) if isinstance(step, ir.Use) and step.segment.kind == kind)


def sizes(buffers: tuple[ir.Buffer, ...]) -> dict[str, float]:
    """Bytes, or bytes of a received row; of values of eight bits with their scales."""
    totals: dict[str, float] = {}
    for b in buffers:
        if not b.alias:
            name = b.name.removesuffix("_scales")
            totals[name] = totals.get(name, 0) + b.fixed_bytes + b.row_bytes
    return totals


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((4096, 7168), "float8_e4m3fn[1x128]", 4096 * (7168 + 56 * 4)),
        ((7168, 2048), "float8_e4m3fn[128x128]", 7168 * 2048 + 56 * 16 * 4),
        ((4, 4096, 7168), "float8_e4m3fn[128x128]", 4 * (4096 * 7168 + 32 * 56 * 4)),
        (("R", 7168), "float8_e4m3fn[1x128]", 7392),  # of a row: bytes of a dispatched token
        (("R", 7168), "float8_e4m3fn[128x1]", 7392),
        (("R", 7168), "float8_e4m3fn[1x128 pow2]", 7392),
        ((7168, "R/128"), "float32", 7168 * 4 // 128),  # scales of tiles along columns
        ((130, 130), "float8_e4m3fn[128x128]", 130 * 130 + 4 * 4),  # tiles that are not full have scales too
        ((3, 5), "bfloat16", 30),
        (("R", 5), "float32", 20),
        ((), "float64", 8),
    ],
)
def test_bytes(shape: tuple[int | str, ...], dtype: str, size: int) -> None:
    assert tensor_bytes(shape, dtype) == size


def test_tiles_are_transposed() -> None:
    assert transpose_tiles("float8_e4m3fn[1x128]") == "float8_e4m3fn[128x1]"
    assert transpose_tiles(transpose_tiles("float8_e4m3fn[2x64 pow2]")) == "float8_e4m3fn[2x64 pow2]"


# ---------------------------------------------------------------- as published


@pytest.mark.parametrize("output", ["e5m6", "bf16"])
def test_attention_saves_latents_and_its_output(output: str) -> None:
    """Norms and up-projections are recomputed, so their results are not saved in any dtype. The attention output
    is read by its own backward: it is saved in 12 bits with an exponent for each 128 numbers, without a second copy."""
    cut_segment = cut(use_of(deepseek(f"precision.attention_output={output}"), "attention").segment)
    saved = {name: size for name, size in sizes(cut_segment.saved).items() if not name.endswith(("rstd", "lse"))}
    attended = {
        "e5m6": {"mla_attention_0_kept": T * (16384 + 128), "mla_attention_0_kept_low": T * 16384 // 2},
        "bf16": {"mla_attention_0": T * 16384 * 2},
    }
    assert saved == {"linear_0": T * 1536 * 2, "linear_2": T * 576 * 2} | attended[output]
    assert attended[output].keys() < {*cut_segment.W.args}


def test_experts_keep_rows_and_the_input_of_swiglu_in_eight_bits() -> None:
    use = use_of(deepseek(), "experts")
    cut_segment = cut(use.segment)
    assert sizes(cut_segment.saved) == {"grouped_linear_0_fp8": 4096 * TILE}
    rows = {"rows", "d_y", "grouped_linear_0_fp8"}  # as they came; SwiGLU is computed again
    assert rows | {f"{name}_scales" for name in rows} <= set(cut_segment.W.args)
    assert sizes(cut_segment.deferred) == {"d_grouped_linear_0_columns": 4096 * TILE}
    assert sizes(cut_segment.gradients) == {"d_rows": D * 2, "d_gate": 4}  # combine = bf16; gate weights are fp32


def test_rows_travel_in_eight_bits_and_back_in_sixteen() -> None:
    """Per token and expert rank: 7,392 bytes there, forward and backward, and 14,336 back."""
    exchanges = [step for step in model_steps(deepseek()) if isinstance(step, ir.Communication)][:2]
    dispatch, combine = exchanges
    to_experts, from_experts = (
        (sizes(dispatch.sizes)["L3_rows"] / S, sizes(combine.sizes)["L3_expert_rows"]),
        (sizes(dispatch.arriving)["d_L3_received_rows"], sizes(combine.arriving)["d_L3_returned_rows"] / S),
    )
    assert (to_experts, from_experts) == ((7392, 14_336), (14_336, 7392))
    received = sizes(dispatch.outputs)["L3_received_rows"], sizes(combine.outputs)["L3_returned_rows"] / S
    returned = sizes(dispatch.returned)["d_L3_rows"] / S, sizes(combine.returned)["d_L3_expert_rows"]
    assert (received, returned) == (to_experts, from_experts)
    router, experts, join = (cut(use_of(deepseek(), kind).segment) for kind in ("router", "experts", "join"))
    assert {(b.name, b.dtype) for b in router.outputs} > {("rows", "float8_e4m3fn"), ("rows_scales", "float32")}
    assert [(b.name, b.dtype) for b in experts.outputs] == [("y", "bfloat16")]
    assert {(b.name, b.dtype) for b in join.gradients} > {("d_rows", "float8_e4m3fn"), ("d_rows_scales", "float32")}


def test_the_gates_gradient_keeps_its_width() -> None:
    dispatch = next(step for step in model_steps(deepseek()) if isinstance(step, ir.Communication))
    assert [(b.name, b.dtype) for b in dispatch.returned][-1] == ("d_L3_gate", "float32")


@pytest.mark.parametrize("kind", ["attention", "dense", "experts", "mtp_input", "shared"])
@pytest.mark.parametrize("recompute", ["[]", "[rmsnorm, mla_up, swiglu]", "[swiglu]", "[rmsnorm]"])
def test_every_product_reads_eight_bits(kind: str, recompute: str) -> None:
    """All products read eight bits; and no function keeps a value in both its wide and its narrow form."""
    joint = interpret(use_of(deepseek(f"recompute={recompute}"), kind).segment)
    for node in joint.nodes:
        if node.op.removesuffix("_dgrad").removesuffix("_wgrad") in PRODUCTS:
            assert all(is_packed(joint.tensors[value].dtype) for value in node.reads[:2]), node
        if node.op.endswith("_wgrad") and "linear" in node.op:
            tiles = [parse_packed(joint.tensors[value].dtype) for value in node.reads[:2]]
            assert [(tile.rows, tile.columns) for tile in tiles] == [(128, 1)] * 2
    cut_segment = split(unpack_tensors(joint)).cut
    saved = {b.name for b in (*cut_segment.saved, *cut_segment.deferred)}
    assert not any(name.removesuffix("_fp8") in saved for name in saved if name.endswith("_fp8"))
    assert not any(f"{name}_fp8" in saved for name in cut_segment.W.args)


def test_scales_that_are_powers_of_two() -> None:
    """Only scales of the attention output and of rows sent to experts are powers of two (§3.2.1, §3.3.3)."""
    casts = set()
    for kind in ("attention", "dense", "experts", "join", "mtp_input", "router", "shared"):
        for node in interpret(use_of(deepseek(), kind).segment).nodes:
            if "quantise" in node.op:
                tensors = interpret(use_of(deepseek(), kind).segment).tensors
                packed = [parse_packed(t.dtype) for t in map(tensors.get, node.outputs) if t and is_packed(t.dtype)]
                pow2 = {packing.has_pow2_scales for packing in packed if packing.form is None}
                casts |= {(kind, node.reads[0])} if pow2 == {True} else set()
    assert casts == {
        ("attention", "linear_1"),  # queries: attention, and the cast of its output, in one op
        ("attention", "mla_attention_0_kept"),
        ("experts", "rows"),
        ("experts", "d_y"),
        ("join", "d_y"),
        ("router", "h"),  # the sum of the residual stream, its norm and what becomes rows in one op
    }


@pytest.mark.parametrize("kind", ["router", "head"])
def test_gate_and_head_stay_wide(kind: str) -> None:
    joint = interpret(use_of(deepseek(), kind).segment)
    products = [node for node in joint.nodes if "linear" in node.op]
    assert products and not any(is_packed(joint.tensors[value].dtype) for node in products for value in node.reads)


def test_without_recompute_results_are_kept_quantised() -> None:
    """Results of norms and SwiGLU are saved in 8 bits for weight gradients, inputs of their backwards in 16 bits."""
    cut_segment = cut(use_of(deepseek("recompute=[]"), "dense").segment)
    assert {name: size for name, size in sizes(cut_segment.saved).items() if "rstd" not in name} == {
        "add_0": T * D * 2,  # the residual stream
        "rmsnorm_0_fp8": T * D * TILE,
        "linear_0": T * 2 * 18432 * 2,
        "swiglu_0_fp8": T * 18432 * TILE,
    }


def test_quantising_takes_time() -> None:
    """Bytes of quantising ops: read in 16 bits, written in 8; a transposition reads and writes 8 bits."""
    costs = dict(cut(use_of(deepseek("recompute=[]"), "dense").segment).costs)
    casts = {phase: [(op, work.bytes) for op, work in cost.ops if "quantise" in op] for phase, cost in costs.items()}
    norm, gate, up = T * D, T * 18432, T * 2 * 18432
    assert casts["F"] == [("quantise", norm * (2 + TILE)), ("quantise", gate * (2 + TILE))]
    assert casts["I"] == [("quantise_both", norm * (2 + 2 * TILE)), ("quantise_both", up * (2 + 2 * TILE))]
    assert sorted(casts["W"]) == sorted([("requantise", norm * 2 * TILE), ("requantise", gate * 2 * TILE)])
    plain = dict(cut(use_of(deepseek("recompute=[]", "precision=bf16"), "dense").segment).costs)
    assert [plain[phase].flops for phase in "FIW"] == [costs[phase].flops for phase in "FIW"]


# ---------------------------------------------------------------- other recipes


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_built_in_recipes_store_values_in_their_compute_dtype(precision: str) -> None:
    spec = deepseek(f"precision={precision}")
    assert precision in BUILT_IN
    for kind in ("attention", "dense", "router", "shared", "experts", "join", "head", "mtp_input"):
        segment = use_of(spec, kind).segment
        assert segment.stored == ()
        ops = {node.op for node in interpret(segment).nodes}
        assert not any("quantise" in op for op in ops)


def test_only_dispatch_in_eight_bits() -> None:
    """BF16 products read rows that arrived in eight bits without a further cast, forward and backward."""
    spec = deepseek("precision.linear=bf16")
    cut_segment = cut(use_of(spec, "experts").segment)
    assert sizes(cut_segment.saved) == {"grouped_linear_0": 4096 * 2}
    joint = interpret(use_of(spec, "experts").segment)
    assert joint.tensors["rows"].dtype == joint.tensors["d_y"].dtype == "float8_e4m3fn[1x128 pow2]"
    assert "add_rmsnorm_quantise_wide" in {node.op for node in interpret(use_of(spec, "router").segment).nodes}
