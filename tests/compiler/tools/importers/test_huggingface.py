"""Configs against `transformers`: the imported model has the parameters of the one that transformers builds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from compiler.cli.commands.import_ import CONFIG, read_config
from compiler.tools.importers import huggingface
from compiler.tools.importers.first_run import run_text
from compiler.tools.importers.huggingface import ImportedConfig
from compiler.tools.importers.json_text import parse
from compiler.tools.importers.reader import IRRELEVANT, REFUSED
from compiler.tools.importers.write import model_text
from dsl.closed_forms.counts import parameters
from dsl.load import check, load
from dsl.messages.diagnostics import Source
from dsl.schema import Balance, Model, Moe, Spec

ROOT = Path(__file__).parents[4]
CONFIGS = sorted((Path(__file__).parent / "configs").glob("*.json"))
NAMES = [path.stem for path in CONFIGS]
# Parameters without MTP: the Hub's count for the published safetensors. Those of gpt-oss are counted with MXFP4
# unpacked, as in its model card (arXiv 2508.10925, table 1: 20.91B and 116.83B); of GLM-4.5-Air see
# tests/compiler/tools/weights; Moonlight's files also have the frequencies of rotation of each layer, which follow
# from its configuration.
PUBLISHED = {
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "granite-3.3-8b": 8_170_864_640,
    "kimi-k2": 1_026_408_232_448,
    "llama-3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "moonlight-16b-a3b": 15_960_111_936 - 27 * 64,
    "olmo-2-7b": 7_298_617_344,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm3-3b": 3_075_098_624,
}
SAME_CLASS = {"kimi_k2": "deepseek_v3"}  # types that transformers knows by another name


def config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(next(path for path in CONFIGS if path.stem == name).read_text("utf-8"))
    return values


def imported(values: dict[str, Any], *, lossy: bool = False) -> ImportedConfig:
    return huggingface.read(parse(Source(CONFIG, json.dumps(values))), "m", lossy=lossy)


def model_of(values: dict[str, Any]) -> Model:
    imported_config = imported(values)
    assert imported_config.model is not None, imported_config.diagnostics
    return imported_config.model


def loaded(found: ImportedConfig, folder: Path) -> Spec:
    """The spec that the import writes, read back."""
    assert found.model is not None
    text = f"{run_text(found.model, found.context)}\n{model_text(found.model, found.model_type, found.remarks)}"
    (folder / "m.dsc").write_text(text, "utf-8")
    return load(folder / "m.dsc")


def built(transformers_config: PreTrainedConfig) -> tuple[int, int]:
    """(parameters, entries of balancing biases) of the model transformers makes; no memory is used."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config)
    biases = (buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(parameter.numel() for parameter in model.parameters()), sum(biases)


@pytest.mark.parametrize("name", NAMES)
def test_published_shapes(name: str, tmp_path: Path) -> None:
    values = config(name)
    model = model_of(values)
    values.pop("auto_map", None)
    kind = values.pop("model_type")
    counted, biases = built(AutoConfig.for_model(SAME_CLASS.get(kind, kind), **values))
    count = parameters(model)
    assert (count.total - count.bias, count.bias) == (counted, biases)
    assert count.total == PUBLISHED.get(name, count.total)


@pytest.mark.parametrize("name", NAMES)
def test_the_spec_is_right_and_reads_back(name: str, tmp_path: Path) -> None:
    imported_config = imported(config(name))
    assert imported_config.model is not None
    text = model_text(imported_config.model, imported_config.model_type, imported_config.remarks)
    (tmp_path / "alone.dsc").write_text(text, "utf-8")
    assert check(tmp_path / "alone.dsc") == ()
    assert loaded(imported_config, tmp_path).model == imported_config.model


SHIPPED = {  # specs of this repository, written from the reports
    "deepseek-v2": "deepseek-v2",
    "deepseek-v2-lite": "deepseek-v2-lite",
    "deepseek-v3": "deepseek-v3",
    "kimi-k2": "kimi-k2",
    "llama-3-8b": "llama3-8b",
    "moonlight-16b-a3b": "moonlight-16b-a3b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
}


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_imports_equal_the_shipped_models(name: str) -> None:
    """The model without settings that a config lacks (schedules of balancing and MTP, the node limit) or that differ: a
    config has its class's init_std and balancing-loss weight, not the report's, and the RoPE of the published weights,
    whose context was extended after pre-training."""

    def compared(model: Model) -> Model:
        layers = tuple(
            span.model_copy(update={"ffn": span.ffn.model_copy(update={"balance": Balance(), "max_nodes": None})})
            if isinstance(span.ffn, Moe)
            else span
            for span in model.layers
        )
        mtp = model.mtp and model.mtp.model_copy(update={"weight": ()})
        rope = model.attention.rope and model.attention.rope.model_copy(update={"scaling": None})
        attention = model.attention.model_copy(update={"rope": rope})
        changes = {"name": "", "init_std": 0.0, "attention": attention, "layers": layers, "mtp": mtp}
        return model.model_copy(update=changes)

    shipped = load(ROOT / "specs" / f"{SHIPPED[name]}.dsc").model
    assert compared(model_of(config(name))) == compared(shipped)


# ---------------------------------------------------------------- random small configs, written by transformers

SIZES = st.integers(1, 24)
COMMON = {
    "vocab_size": st.integers(2, 300),
    "intermediate_size": SIZES,
    "rms_norm_eps": st.sampled_from([1e-6, 1e-5]),
    "initializer_range": st.sampled_from([0.02, 0.006]),
    "rope_theta": st.sampled_from([10_000, 500_000.0]),
}


@st.composite
def attention_gqa(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, group, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    heads = kv_heads * group
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "hidden_size": heads * draw(st.integers(1, 8)),
    }


@st.composite
def attention_mla(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 4))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * draw(st.integers(1, 8)),
        "q_lora_rank": draw(st.none() | SIZES),
        "kv_lora_rank": draw(SIZES),
        "qk_nope_head_dim": draw(SIZES),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 6)),
        "v_head_dim": draw(SIZES),
    }


@st.composite
def experts(draw: st.DrawFn, layers: int) -> dict[str, Any]:
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    chosen_groups = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": chosen_groups,
        "num_experts_per_tok": draw(st.integers(1, chosen_groups * per_group)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(SIZES),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }


@st.composite
def configs(draw: st.DrawFn) -> PreTrainedConfig:
    layers = draw(st.integers(1, 5))
    values = {key: draw(strategy) for key, strategy in COMMON.items()} | {"num_hidden_layers": layers}
    kind = draw(st.sampled_from([DeepseekV2Config, DeepseekV3Config, LlamaConfig, MistralConfig, MixtralConfig,
                                 Qwen3Config, Qwen3MoeConfig]))  # fmt: skip
    if kind in (DeepseekV2Config, DeepseekV3Config):
        values |= draw(attention_mla()) | draw(experts(layers))
        if kind is DeepseekV2Config:
            values["topk_method"] = "group_limited_greedy"
        else:
            values["num_nextn_predict_layers"] = draw(st.integers(0, 1))
        return kind(**values)
    values |= draw(attention_gqa())
    if kind is MixtralConfig:
        values |= {"num_local_experts": 4, "num_experts_per_tok": draw(st.integers(1, 4))}
    if kind is Qwen3MoeConfig:
        dense = st.lists(st.integers(0, layers - 1), unique=True)
        values |= {"num_experts": 4, "num_experts_per_tok": draw(st.integers(1, 4)), "moe_intermediate_size": 8}
        values |= {"decoder_sparse_step": draw(st.integers(1, 3)), "mlp_only_layers": draw(dense)}
    if kind is MistralConfig:
        values["sliding_window"] = None
    return kind(**values)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")  # no shared experts
@given(configs())
@settings(max_examples=200)
def test_random_configs(values: PreTrainedConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        values.save_pretrained(folder)
        file, root = read_config(Path(folder))
        assert file.name == CONFIG
        imported_config = huggingface.read(root, "m")
        assert imported_config.model is not None, imported_config.diagnostics
        assert not [item for item in imported_config.diagnostics if item.code == "I0302"]  # no unknown key
        counted, biases = built(values)
        count = parameters(imported_config.model)
        assert (count.total - count.bias, count.bias) == (counted, biases)
        assert loaded(imported_config, Path(folder)).model == imported_config.model


# ---------------------------------------------------------------- nothing is dropped

OTHER = {int: 7, float: 0.37, bool: None, str: "strange", list: ["strange"], dict: {"strange": 1}, type(None): 3}
WITHOUT_EFFECT = {  # on this model, and why
    "deepseek-v2-lite": {
        "n_group",
        "topk_group",
    },  # greedy has no groups: n_group is reported, topk_group belongs to it
    "qwen2.5-7b": {"sliding_window", "use_sliding_window"},  # its window is as long as its context
    "qwen3-30b-a3b": {"intermediate_size", "sliding_window", "use_sliding_window"},  # no dense layer, no window
    "qwen3-8b": {"sliding_window", "use_sliding_window"},
    "smollm3-3b": {"no_rope_layer_interval", "sliding_window", "use_sliding_window"},  # given by no_rope_layers
}
OF_MLA = {"num_key_value_heads", "head_dim"}  # MLA has as many keys as queries


def outcome(values: dict[str, Any]) -> tuple[Model | None, tuple[str, ...]]:
    imported_config = imported(values)
    return imported_config.model, tuple(item.message for item in imported_config.diagnostics)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_counts_or_is_known_not_to(name: str) -> None:
    values = config(name)
    before = outcome(values)
    silent = set(IRRELEVANT) | WITHOUT_EFFECT.get(name, set()) | (OF_MLA if "kv_lora_rank" in values else set())
    for key, value in values.items():
        changed = (not value) if isinstance(value, bool) else OTHER[type(value)]
        has_effect = outcome(values | {key: changed}) != before
        assert has_effect or key in silent, key
    assert outcome(values | {"mystery": 1})[1] != before[1]


READERS = {  # a type whose class reads the key
    **{"attention_bias": "deepseek-v3", "mlp_bias": "deepseek-v2-lite", "router_jitter_noise": "mixtral-8x7b"},
    **{"use_bidirectional_attention": "gemma-3-1b", "attention_dropout": "llama-3-8b"},
    "partial_rotary_factor": "llama-3-8b",
}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_refused_keys(key: str, tmp_path: Path) -> None:
    """A key is refused if the type's class reads it. Otherwise it is reported as not read."""
    fallback = "qwen2.5-7b"
    for name in {READERS.get(key, fallback)} | ({fallback} if REFUSED[key].types is not None else set()):
        plain = config(name)
        before = imported(plain)
        values = plain | {key: 3.5}
        messages_before = [item.message for item in before.diagnostics]
        new = [item for item in imported(values).diagnostics if item.message not in messages_before]
        is_read = REFUSED[key].is_read(plain["model_type"])
        assert is_read == (key in READERS and name == READERS[key])
        (refusal,) = [item for item in new if key in item.message]
        assert (refusal.code, refusal.severity) == (("I0301", "error") if is_read else ("I0302", "warning"))
        for harmless in (*REFUSED[key].harmless, None):
            assert [item.message for item in imported(values | {key: harmless}).diagnostics] == messages_before
        lossy = imported(values, lossy=True)
        assert lossy.model == before.model and len(lossy.diagnostics) == len(messages_before) + 1
        assert lossy.model is not None
        text = model_text(lossy.model, lossy.model_type, lossy.remarks)
        assert f"`{key}` = " in text.replace("\n", " ")
        assert loaded(lossy, tmp_path).model == lossy.model


def test_an_omitted_balancing_loss_is_reported() -> None:
    """A V3 without the key has its class's loss, one with null has none; both are reported, also in the spec."""
    values = config("deepseek-v3")
    del values["aux_loss_alpha"]
    absent, null = imported(values), imported(values | {"aux_loss_alpha": None})
    for imported_config, weight, text in (
        (absent, 0.001, "0.001 is the default of deepseek_v3; DeepSeek-V3's report has 1e-4"),
        (null, 0.0, "aux_loss_alpha = null: no loss balances the experts' load within a sequence"),
    ):
        assert imported_config.model is not None
        ffn = imported_config.model.layers[-1].ffn
        assert isinstance(ffn, Moe) and ffn.balance.sequence_loss == weight
        assert any(text in remark.text and remark.place == "balance" for remark in imported_config.remarks)
