"""A config with missing keys is imported as the model that `transformers` builds, and the defaults are reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from compiler.tools.importers import huggingface
from compiler.tools.importers.families import FAMILIES
from compiler.tools.importers.huggingface import LONGEST, ImportedConfig
from compiler.tools.importers.json_text import parse
from dsl.messages.diagnostics import Source
from dsl.schema import Gqa

SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 8}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = SIZES | EXPERTS | {"n_routed_experts": 32}
SIZES_OF = {  # required keys of a config
    "deepseek": DEEPSEEK,
    "deepseek_v2": DEEPSEEK | MLA,
    "deepseek_v3": DEEPSEEK | MLA,
    "deepseek_v32": DEEPSEEK | MLA,
    "deepseek_v4": {key: DEEPSEEK[key] for key in DEEPSEEK if key != "intermediate_size"}
    | {"q_lora_rank": 64, "head_dim": 16, "o_groups": 4, "o_lora_rank": 32}
    | {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 16},
    "gemma2": SIZES,
    "gemma3_text": SIZES | {"num_hidden_layers": 6},  # the last one has no window
    "gpt_oss": SIZES | {"num_experts_per_tok": 2, "num_local_experts": 8},
    "glm4_moe": DEEPSEEK,
    "granite": SIZES,
    "kimi_k2": DEEPSEEK | MLA,
    "llama": SIZES,
    "mistral": SIZES,
    "mixtral": SIZES | {"num_experts_per_tok": 2, "num_local_experts": 8},
    "olmo2": SIZES,
    "olmoe": SIZES | {"num_experts_per_tok": 8, "num_experts": 32},
    "qwen2": SIZES,
    "qwen2_moe": SIZES | EXPERTS | {"num_experts": 32},
    "qwen3": SIZES,
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 32},
    "smollm3": SIZES,
    "qwen3_next": SIZES
    | EXPERTS
    | {"num_experts": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "kimi_linear": SIZES
    | MLA
    | {"moe_intermediate_size": 48, "num_experts_per_token": 8, "num_experts": 32}
    | {"linear_num_heads": 4, "linear_head_dim": 16},
}
CLASSES = {"kimi_k2": "deepseek_v3", "deepseek": "llama"}  # the class of types that transformers does not have
# Types with classes only beside the published weights: configuration_deepseek.py of DeepSeek-MoE,
# DeepSeek-V2 and DeepSeek-V3, and the copy of the last beside Kimi-K2-Base.
LOSS = {"aux_loss_alpha": 0.001, "seq_aux": True, "moe_layer_freq": 1}
GATE_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
BESIDE = {
    "deepseek": LOSS
    | {"scoring_func": "softmax", "norm_topk_prob": False, "first_k_dense_replace": 0, "n_shared_experts": None},
    "deepseek_v2": LOSS | {"scoring_func": "softmax"},
    "deepseek_v3": LOSS | GATE_V3,
    "deepseek_v32": LOSS | GATE_V3 | {"num_nextn_predict_layers": 1},
    "kimi_k2": LOSS | GATE_V3,
    "kimi_linear": {"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 1},
}


def whole(model_type: str) -> dict[str, Any]:
    """A config of given sizes in which everything else is written, with the defaults of its class."""
    sizes = SIZES_OF[model_type]
    values: dict[str, Any] = CONFIG_MAPPING[CLASSES.get(model_type, model_type)](**sizes).to_dict()
    values.pop("mlp_layer_types", None)  # its published configuration has first_k_dense_replace
    return values | BESIDE.get(model_type, {}) | sizes | {"model_type": model_type}


def imported(values: dict[str, Any]) -> ImportedConfig:
    """The model; `lossy`, as Mistral's default is a window, which a spec does not have."""
    imported_config = huggingface.read(parse(Source("config.json", json.dumps(values))), "mine", lossy=True)
    assert imported_config.model is not None, imported_config.diagnostics
    return imported_config


def filled(found: ImportedConfig) -> set[str]:
    """The keys reported as filled with defaults, the same on the terminal and in the spec."""
    messages = [item.message for item in found.diagnostics if item.code == "I0304"]
    assert messages == [remark.text for remark in found.remarks if remark.text in messages] and len(messages) < 2
    listed = messages[0].partition(": ")[2].split(", ") if messages else []
    return {entry.partition(" = ")[0] for entry in listed}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_of_sizes_only_gives_the_model_of_all_defaults(model_type: str) -> None:
    complete = imported(whole(model_type))
    silent = imported(SIZES_OF[model_type] | {"model_type": model_type})
    assert (silent.model, silent.context) == (complete.model, complete.context)
    assert not filled(complete)
    unread = {"num_key_value_heads"} if FAMILIES[model_type].attention == "mla" else set()
    rope = {"rope_parameters"} if FAMILIES[model_type].rope else set()
    assert filled(silent) == set(FAMILIES[model_type].defaults) - unread | rope


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_key_that_is_left_out_is_its_default(model_type: str) -> None:
    all_keys = whole(model_type)
    expected = imported(all_keys)
    for key in set(all_keys) - set(SIZES_OF[model_type]) - {"model_type"}:
        imported_config = imported({name: value for name, value in all_keys.items() if name != key})
        assert (imported_config.model, imported_config.context) == (expected.model, expected.context), key
        assert filled(imported_config) <= {key, "rope_theta", "rope_local_base_freq"}, (
            "of rope_parameters, what is in it"
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_another_value_is_another_model(model_type: str) -> None:
    """Every default matters, so the tests above can fail."""
    all_keys = whole(model_type)
    rope = all_keys.pop("rope_parameters", {"rope_theta": 1e4})  # or has none
    all_keys.pop("mlp_layer_types", None)  # first_k_dense_replace layer by layer
    if FAMILIES[model_type].local_theta:
        all_keys |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
        rope = rope["full_attention"]
    if FAMILIES[model_type].attention == "compressed":
        all_keys |= {"compress_rope_theta": rope["compress"]["rope_theta"]}
        rope = rope["main"]
    all_keys |= {"rope_theta": rope["rope_theta"]}
    expected = imported(all_keys)
    for key in filled(imported(SIZES_OF[model_type] | {"model_type": model_type})) - {
        "topk_method",
        "scoring_func",
        "moe_router_activation_func",
        "hidden_activation",
        "rope_parameters",
    }:
        value = all_keys[key]
        if key == "topk_group" and all_keys.get("n_group", all_keys.get("num_expert_group")) == 1:
            continue  # there is but one to choose
        value = 1.0 if value is None else value  # no bound: another one is one
        double = isinstance(value, float) or (key in ("n_group", "num_expert_group") and value == 1)
        changed = not value if isinstance(value, bool) else value * 2 if double else value // 2 or 1 - value
        imported_config = imported(all_keys | {key: changed})
        is_same = (imported_config.model, imported_config.context) == (expected.model, expected.context)
        assert not is_same or (key in ("max_position_embeddings", "model_max_length") and value > LONGEST), key


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_null_key_heads_mean_as_many_as_heads(model_type: str) -> None:
    imported_config = imported(
        SIZES | {"model_type": model_type, "num_key_value_heads": None, "num_attention_heads": 16}
    )
    config = CONFIG_MAPPING[model_type](**SIZES | {"num_attention_heads": 16}, num_key_value_heads=None)
    assert imported_config.model is not None and isinstance(imported_config.model.attention, Gqa)
    assert imported_config.model.attention.kv_heads == config.num_key_value_heads == 16
