"""Keys of attention in configs, as imported and read back from the written spec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from compiler.tools.importers.families import FAMILIES
from dsl.closed_forms.counts import parameters
from dsl.schema import DeltaNet, Gqa, LinearScaling, Llama3Scaling, Mla, Model, Moe, Rope, YarnScaling
from tests.compiler.tools.importers.test_defaults import SIZES, SIZES_OF
from tests.compiler.tools.importers.test_huggingface import built, imported, loaded

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "high_freq_factor": 3.0}


def model_of(folder: Path, model_type: str, **keys: Any) -> Model:
    imported_config = imported(SIZES_OF[model_type] | {"model_type": model_type} | keys)
    assert imported_config.model is not None, imported_config.diagnostics
    spec = loaded(imported_config, folder).model
    assert spec == imported_config.model
    return spec


def grouped(folder: Path, model_type: str, **keys: Any) -> Gqa:
    attention = model_of(folder, model_type, **keys).attention
    assert isinstance(attention, Gqa)
    return attention


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 4.0}, LinearScaling(factor=4.0)),
        (LLAMA3, Llama3Scaling(factor=8.0, original=8192, high_freq_factor=3.0)),
        (YARN, YarnScaling(factor=40.0, original=4096, mscale=0.7)),
        (YARN | {"truncate": False}, YarnScaling(factor=40.0, original=4096, mscale=0.7, truncate=False)),
        ({"rope_type": "dynamic", "factor": 2.0}, None),  # as plain as the context that it extends
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn, not truncated", "dynamic"],
)
def test_rotations(tmp_path: Path, key: str, given: dict[str, Any], scaling: object) -> None:
    attention = grouped(tmp_path, "llama", **{key: given | {"rope_theta": 500.0}}, rope_theta=500.0)
    assert attention.rope == Rope(theta=500.0, scaling=scaling)


def test_a_rotation_out_of_bounds_is_refused() -> None:
    (error,) = (
        item
        for item in imported(SIZES | {"model_type": "llama", "rope_scaling": YARN | {"factor": 0.5}}).diagnostics
        if item.severity == "error"
    )
    assert error.code == "I0203" and "`factor` = 0.5" in error.message


@pytest.mark.parametrize("model_type", ["qwen2", "glm4_moe", "olmoe", "deepseek_v3", "llama", "mistral"])
def test_parameters_equal_transformers(tmp_path: Path, model_type: str) -> None:
    keys: dict[str, Any] = {"tie_word_embeddings": False}
    keys |= {"attention_bias": True} if model_type in ("glm4_moe", "llama") else {}
    keys |= {"use_qk_norm": True} if model_type == "glm4_moe" else {}
    count = parameters(model_of(tmp_path, model_type, **keys))
    theirs = CONFIG_MAPPING[model_type](**SIZES_OF[model_type], **keys, pad_token_id=None)
    assert (count.total - count.bias, count.bias) == built(theirs)


def test_parts_of_heads_and_biases(tmp_path: Path) -> None:
    glm = grouped(tmp_path, "glm4_moe", attention_bias=True, use_qk_norm=True)
    assert (glm.bias, glm.qk_norm, glm.rope and glm.rope.width) == ("qkv", "head", glm.head_dim // 2)
    quarter = grouped(tmp_path, "glm4_moe", partial_rotary_factor=0.25)
    assert (quarter.bias, quarter.qk_norm, quarter.rope and quarter.rope.width) == (None, None, glm.head_dim // 4)
    assert grouped(tmp_path, "llama", attention_bias=True).bias == "all"
    assert grouped(tmp_path, "qwen2").bias == "qkv"
    assert grouped(tmp_path, "olmoe").qk_norm == "width"


def test_windows(tmp_path: Path) -> None:
    assert grouped(tmp_path, "mistral", sliding_window=128).window == 128
    assert grouped(tmp_path, "mistral", sliding_window=None).window is None
    assert grouped(tmp_path, "mistral", sliding_window=4096, max_position_embeddings=2048).window is None
    late = model_of(tmp_path, "qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=3)
    assert [_window(late, layer) for layer in range(5)] == [None, None, None, 64, 64]
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    turns = model_of(tmp_path, "qwen3", use_sliding_window=True, sliding_window=64, layer_types=kinds)
    assert [_window(turns, layer) for layer in range(5)] == [64, None, 64, None, 64]
    assert [(span.first, span.last, span.by) for span in turns.layers] == [(0, 4, 1), (1, 3, 2)]


@pytest.mark.parametrize("model_type", [model_type for model_type, family in FAMILIES.items() if family.linear])
def test_linear_attention_has_the_activation_of_its_convolution(model_type: str) -> None:
    """The class applies `hidden_act` to the convolution too."""
    values = SIZES_OF[model_type] | {"model_type": model_type, "hidden_act": "gelu"}
    errors = [item.message for item in imported(values).diagnostics]
    assert '`hidden_act` = "gelu": it is also the activation of linear attention, which is SiLU in a spec' in errors


def _window(model: Model, layer: int) -> int | None:
    attention = model.attention_of(layer)
    assert isinstance(attention, Gqa)
    return attention.window


def test_latent_attention_keeps_its_scales(tmp_path: Path) -> None:
    attention = model_of(tmp_path, "deepseek_v3", rope_scaling=YARN | {"mscale_all_dim": 1.0}).attention
    assert isinstance(attention, Mla) and attention.rope and isinstance(attention.rope.scaling, YarnScaling)
    assert (attention.rope.scaling.mscale, attention.rope.scaling.mscale_all_dim) == (0.7, 1.0)


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("deepseek_v4", {"compress_ratios": [4, 128, 0]}, "`compress_ratios` must have 0, 4 or 128 for each of 5"),
        ("deepseek_v4", {"compress_ratios": [4, 128, 0, 5, 4]}, "`compress_ratios` must have 0, 4 or 128 for"),
        ("deepseek_v4", {"layer_types": ["sliding_attention"]}, "`layer_types` has 1 entries for 5 layers"),
        ("deepseek_v4", {"layer_types": "all"}, '`layer_types` = "all": layers of "all"; such a model has sliding_'),
        ("deepseek_v4", {"mlp_layer_types": ["moe", "x"]}, '`mlp_layer_types` = ["moe", "x"]: layers of "x"; such a'),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "thick"]}, "`mlp_layer_types` must have dense or sparse for"),
        ("deepseek_v32", {"mlp_layer_types": ["thick"] * 5}, "`mlp_layer_types` must have dense or sparse for all 5"),
        ("deepseek_v32", {"mlp_layer_types": "dense"}, '`mlp_layer_types` must have dense or sparse for all 5'),
        ("smollm3", {"no_rope_layers": [1, 0]}, "`no_rope_layers` must have a 0 or a 1 for each of 5 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1, 1]}, "`no_rope_layers` must have a 0 or a 1 for each of 5 layers"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, 6]}}, "`kda_layers` must have numbers of layers"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [0, 5]}}, "`kda_layers` must have numbers of layers"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1, "2"]}}, "`kda_layers` must have numbers of layers"),
        ("qwen3_next", {"layer_types": ["full_attention"]}, "`layer_types` must have full_attention or"),
        ("mistral", {"sliding_window": "all"}, '`sliding_window` = "all": the window must be a number'),
        ("mistral", {"sliding_window": -1}, "`sliding_window` = -1: the window must be a number of tokens, not -1"),
    ],
)  # fmt: skip
def test_lists_that_do_not_fit_the_layers_are_refused(model_type: str, keys: dict[str, Any], said: str) -> None:
    diagnostics = imported(SIZES_OF[model_type] | {"model_type": model_type} | keys).diagnostics
    assert any(item.severity == "error" and item.message.startswith(said) for item in diagnostics), diagnostics


def test_layers_are_as_they_are_listed(tmp_path: Path) -> None:
    kinds = ["dense", "sparse", "dense", "sparse", "sparse"]
    sparse = model_of(tmp_path, "deepseek_v32", mlp_layer_types=kinds)
    assert [isinstance(sparse.layers[sparse.range_of(layer)].ffn, Moe) for layer in range(5)] == [
        kind == "sparse" for kind in kinds
    ]
    linear = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    kimi = model_of(tmp_path, "kimi_linear", linear_attn_config=linear | {"kda_layers": [1, 3, 5]})
    assert [isinstance(kimi.attention_of(layer), DeltaNet) for layer in range(5)] == [True, False] * 2 + [True]
    all_linear = model_of(tmp_path, "kimi_linear", linear_attn_config=linear | {"kda_layers": [1, 2, 3, 4, 5]})
    assert all(isinstance(all_linear.attention_of(layer), DeltaNet) for layer in range(5))
    smollm = model_of(tmp_path, "smollm3", no_rope_layers=[1, 0, 1, 1, 0])
    attention = [smollm.attention_of(layer) for layer in range(5)]
    assert [isinstance(part, Gqa) and part.rope is not None for part in attention] == [True, False, True, True, False]


@pytest.mark.parametrize(
    "keys", [{}, {"num_hash_layers": 1}, {"num_hash_layers": 0}, {"mlp_layer_types": ["moe", "hash_moe"] * 2 + ["moe"]}]
)
def test_a_table_chooses_experts_in_the_layers_of_the_config(keys: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(tmp_path, "deepseek_v4", **keys)
    parts = [model.layers[model.range_of(layer)].ffn for layer in range(5)]
    kinds = CONFIG_MAPPING["deepseek_v4"](**SIZES_OF["deepseek_v4"], **keys).mlp_layer_types
    assert ["hash_moe" if isinstance(part, Moe) and part.choice == "table" else "moe" for part in parts] == kinds
