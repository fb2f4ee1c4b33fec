"""Parameters and FLOPs: exactly the published ones, and closed forms equal to what layers declare and compute.

`dsl/closed_forms/counts.py` has the closed form of the sum in `count_parameters` over layers, and `in_closed_form` that
of `flops_per_token` over their ops. Changing only a layer fails here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from transformers import AutoConfig, AutoModelForCausalLM

from compiler.ir import Param, Segment
from compiler.model import layers
from compiler.model.layers import Place, gqa
from compiler.plan.blocks import model_steps
from compiler.plan.parameters import count_parameters
from compiler.plan.parameters import parameters as laid_out
from compiler.predict.prediction import Flops
from dsl.closed_forms import counts
from dsl.schema import AnyAttention, Compressed, DeltaNet, Dense, Gqa, Model, Moe, Spec
from tests.specs.counted import flops_of
from tests.specs.shipped import RUNS, shipped
from tests.specs.strategies import specs

# Main models, without the MTP block. The sums of the safetensors on Hugging Face; DeepSeek-V3's with the biases of its
# 58 gates; Moonlight's without the 27·64 constant angles that its files also hold.
PUBLISHED = {
    "deepseek-v3.dsc": 671_026_419_200,
    "deepseek-v3.2.dsc": 671_026_419_200 + 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64),
    "deepseek-v2.dsc": 235_741_434_880,
    "deepseek-v2-lite.dsc": 15_706_484_224,
    "moonlight-16b-a3b.dsc": 15_960_111_936 - 27 * 64,
    "kimi-k2.dsc": 1_026_408_232_448,
    "llama3-8b.dsc": 8_030_261_248,
    "qwen3-30b-a3b.dsc": 30_532_122_624,
}


@pytest.mark.parametrize(("file", "total"), PUBLISHED.items())
def test_published_totals(file: str, total: int) -> None:
    assert counts.parameters(shipped(file).model).total == total


def test_parameters_of_deepseek_v32_equal_transformers() -> None:
    """The class of `transformers` with the published configuration, on the meta device, without memory."""
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32"))
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    total = sum(tensor.numel() for tensor in (*theirs.parameters(), *biases))
    assert counts.parameters(shipped("deepseek-v3.2.dsc").model).total == total


def test_deepseek_v3_in_parts() -> None:
    """arXiv 2412.19437, and the sizes of its layers (reference by arithmetic from the public configuration)."""
    model = shipped("deepseek-v3.dsc").model
    count = counts.parameters(model)
    assert count.bias == 58 * 256 == 14_848
    assert count.attention == 187_107_328
    assert counts.layer_parameters(model, 60) == 11_507_286_272
    moe = model.ffn(60)
    assert moe.kind == "moe" and counts.expert_parameters(moe, model.hidden) == 44_040_192
    assert (round(count.active / 1e9, 2), round(count.active_without_embedding / 1e9, 2)) == (37.55, 36.63)
    assert round(count.mtp / 1e9, 2) == 11.61
    assert count.embedding == count.head == 129_280 * 7168


def test_parameters_of_v4_equal_transformers() -> None:
    """DeepSeek-V4 of the published configurations, as `transformers` makes it: without balancing biases, which its
    class has as buffers, and without the MTP block. The report has 284B and 1.6T (arXiv 2606.19348)."""
    flash = {"compress_ratios": [0, 0, 4, *[128, 4] * 20]}
    widths = {
        "hidden_size": 7168,
        "moe_intermediate_size": 3072,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
    }
    numbers = {"num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 384}
    pro = {**widths, **numbers, "compress_ratios": [128, 128, *[4, 128] * 29, 4]}
    for name, keys, total in (("flash", flash, 284_332_230_231), ("pro", pro, 1_572_997_179_491)):
        config = AutoConfig.for_model("deepseek_v4", **keys)
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config)
        ours = counts.parameters(shipped(f"deepseek-v4-{name}.dsc").model)
        assert sum(tensor.numel() for tensor in theirs.parameters()) == ours.total - ours.bias == total
        tables = [buffer_name for buffer_name, _ in theirs.named_buffers() if buffer_name.endswith("tid2eid")]
        assert len(tables) == 3, "of experts that are chosen by token"


def test_active_parameters_as_the_papers_round_them() -> None:
    rounded = {"deepseek-v2.dsc": 21, "kimi-k2.dsc": 33, "moonlight-16b-a3b.dsc": 3, "qwen3-30b-a3b.dsc": 3}
    for file, billions in rounded.items():
        assert round(counts.parameters(shipped(file).model).active / 1e9) == billions, file
    assert round(counts.parameters(shipped("qwen3-30b-a3b.dsc").model).active / 1e9, 1) == 3.4


def assert_as_laid_out(spec: Spec) -> None:
    rows = [row for row in laid_out(spec) if row.role != "table"]
    model, count = spec.model, counts.parameters(spec.model)
    main = [row for row in rows if not row.name.startswith("mtp.")]
    assert sum(row.num_elements for row in main) == count.total
    assert sum(row.num_elements for row in rows) == count.total + count.mtp
    assert sum(row.num_elements for row in main if row.role == "bias") == count.bias
    assert sum(row.num_elements for row in rows if row.name == "embedding") == count.embedding
    assert sum(row.num_elements for row in rows if row.name == "head") == count.head
    for layer in range(model.num_layers):
        mine = [row for row in main if row.name.startswith(f"layers.{layer}.")]
        assert sum(row.num_elements for row in mine) == counts.layer_parameters(model, layer)
        attention = [
            row
            for row in mine
            if ".attention." in row.name and not row.name.endswith((".attention.norm", ".post_norm"))
        ]
        assert sum(row.num_elements for row in attention) == counts.attention_parameters(
            model, model.attention_of(layer)
        )
        assert layer or sum(row.num_elements for row in attention) == count.attention
        idle = [row for row in mine if row.expert is not None and row.expert >= getattr(model.ffn(layer), "top_k", 0)]
        active = counts.layer_parameters(model, layer) - sum(row.num_elements for row in idle)
        assert counts.active_layer_parameters(model, layer) == active
    assert count.active_without_embedding == count.active - count.embedding
    assert count_parameters(spec, model_steps(spec)) == count
    all_trained = spec.model_copy(update={"train": spec.train.model_copy(update={"only": None})})
    assert flops_of(all_trained) == in_closed_form(model, spec.train.sequence)


def active_biases(ffn: Dense | Moe, D: int) -> int:
    """Biases that a token uses in a layer: one number per column of each product."""
    columns = 2 if ffn.clamp is not None or ffn.activation in ("swiglu", "geglu", "geglu_tanh") else 1
    if isinstance(ffn, Dense):
        return ffn.bias * (columns * ffn.inner + D)
    shared = ffn.shared and columns * ffn.shared * (ffn.shared_inner or ffn.inner) + D
    of_experts = ffn.top_k * (columns * ffn.inner + D) + shared
    return ffn.bias * of_experts + ffn.router_bias * ffn.experts


def twice_seen(attention: Compressed, sequence: int) -> int:
    """Twice the keys and entries that the queries of a sequence see."""
    window = min(sequence, attention.window)
    return window * (2 * sequence - window) + twice_entries(attention, sequence)


def twice_entries(attention: Compressed, sequence: int) -> int:
    """Twice the entries that the queries of a sequence see."""
    if attention.compress is None:
        return 0
    limit = attention.indexer.top_k if attention.indexer else sequence
    return 2 * sum(min(limit, (t + 1) // attention.compress.rate) for t in range(sequence))


def of_states(net: DeltaNet, sequence: int) -> int:
    """FLOPs of a token in the delta rule: three products of a row with each state, and products of all pairs in a
    chunk, half of them masked: two over keys, a triangular system over keys and values, one over values."""
    K, V, chunk = net.key_dim, net.value_dim, min(64, sequence)
    return net.heads * (6 * K * V + chunk * (3 * K + 2 * V))


def vectors_of(attention: AnyAttention, hidden: int) -> int:
    """Parameters of attention that are not matrices."""
    return sum(count for part, count in attention.parameters(hidden).items() if part != "products")


def in_closed_form(model: Model, sequence: int) -> Flops:
    """The published definition: 3·(2·parameters of products + core) on a token, over half or all of the sequence.

    The parameters are the active ones of the main model without embedding, norms, biases, sinks, gates and what mixes
    streams. The core is q·k and the weights' sum of values, over all heads: of a window, or of so many keys that are
    chosen, W·(2S − W) of S² scores, and the entries that each query sees.
    """
    D, layers = model.hidden, range(model.num_layers)
    of_layer = 4 if model.norm == "sandwich" else 2
    norms, core, states = (of_layer * model.num_layers + 1) * D, 0.0, 0
    for attention in map(model.attention_of, layers):
        keys = sequence
        if isinstance(attention, Gqa):
            norms += vectors_of(attention, D)
            keys = min(sequence, attention.window or sequence)
            width = 2 * attention.head_dim
        elif isinstance(attention, DeltaNet):
            parts = attention.parameters(D)
            norms += parts["vectors"] + parts["gates"]
            states += 3 * of_states(attention, sequence)
            continue
        elif isinstance(attention, Compressed):
            norms += vectors_of(attention, D)
            core += 12 * attention.heads * attention.head_dim * twice_seen(attention, sequence) / sequence
            continue
        else:
            norms += vectors_of(attention, D)
            if attention.indexer:
                keys = min(sequence, attention.indexer.top_k)
            width = attention.head_dim.nope + attention.head_dim.rope + attention.head_dim.value
        core += 6 * attention.heads * width * keys * (2 * sequence - keys) / sequence
    count = counts.parameters(model)
    mixtures = [ffn for ffn in map(model.ffn, layers) if isinstance(ffn, Moe)]
    gates = sum(D * (ffn.experts + ffn.shared_gate) for ffn in mixtures)
    gates += 2 * model.num_layers * counts.hyper_parameters(model) + counts.hyper_parameters(model, end=True)
    of_head = count.embedding if model.tied else 0  # one matrix, which is the head too
    biases = count.bias + sum(active_biases(ffn, D) for ffn in map(model.ffn, layers))
    products = 6 * (count.active_without_embedding + of_head - norms - gates - biases) + states
    return Flops(causal=products + core / 2, full=float(products + core))


@pytest.mark.parametrize(("file", "run"), RUNS)
def test_shipped_models_count_as_their_layers(file: str, run: str) -> None:
    spec = shipped(file, run)
    undivided = spec.parallel.model_copy(update={"context": 1, "tensor": 1})  # ranks would split the work
    assert_as_laid_out(spec.model_copy(update={"parallel": undivided}))


@settings(max_examples=60)
@given(specs())
def test_random_models_count_as_their_layers(spec: Spec) -> None:
    assert_as_laid_out(spec)


def test_slots_are_not_counted_as_parameters() -> None:
    """Experts placed by a file have one additional number each, which is not a weight."""
    spec = shipped("quickstart.dsc")
    placed = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"placement": "placement.json"})})
    assert "slots" in {row.role for row in laid_out(placed)}
    assert count_parameters(placed, model_steps(placed)) == counts.parameters(spec.model)


# ---------------------------------------------------------------- a change of only the layer


BUILD = gqa.build


def changed_gqa(place: Place, sizes: Gqa, change: str) -> Segment:
    """Grouped-query attention with one more parameter, or of half the sequence."""
    segment = BUILD(place, sizes)
    if change == "bias":
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        return replace(segment, params=(*segment.params, Param("qkv_bias", (width,), "float32", grad=False)))
    half = place.spec.train.sequence // 2
    stream: Any = segment.function  # the norm before attention, the parts after it, and attention
    attention: gqa.GqaAttention = stream.part.part
    sizes = replace(attention.attend.sizes, sequence=half)
    rotate = replace(attention.project.rotate, sequence=half)
    changed = replace(
        attention,
        project=replace(attention.project, sizes=sizes, rotate=rotate),
        attend=replace(attention.attend, sizes=sizes),
    )
    function = replace(stream, part=replace(stream.part, part=changed))
    constants = dict(segment.constants) | {"sequence": half}
    return replace(segment, function=function, constants=tuple(constants.items()))


@pytest.mark.parametrize("change", ["bias", "window"])
def test_a_change_of_only_the_layer_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = shipped("laptop-gqa.dsc")
    before = count_parameters(spec, model_steps(spec)), flops_of(spec)
    monkeypatch.setitem(gqa.PARAMETERS, "qkv_bias", "attention.qkv_bias")
    monkeypatch.setitem(layers.attention.PARAMETERS, "qkv_bias", "attention.qkv_bias")
    monkeypatch.setattr(layers.attention.gqa, "build", lambda place, sizes: changed_gqa(place, sizes, change))
    after = count_parameters(spec, model_steps(spec)), flops_of(spec)
    assert (before[0] != after[0], before[1] != after[1]) == (change == "bias", change == "window")
    with pytest.raises(AssertionError):
        assert_as_laid_out(spec)
