"""The model types of Hugging Face configurations: the architecture and defaults of each, and unsupported types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Defaults = Mapping[str, int | float | str | bool | None]  # key of a config → default


@dataclass(frozen=True)
class ConfigFamily:
    """The architecture of a model type, and the defaults of keys that its configs leave out."""

    attention: Literal["mla", "gqa", "compressed"]
    ffn: Literal["dense", "deepseek", "deepseek_v4", "qwen", "mixtral", "olmoe", "gpt_oss"]
    defaults: Defaults  # None: the key defaults to null
    qk_norm: Literal["head", "width"] | None = None
    windows: Literal["", "all", "listed"] = ""  # layers with sliding_window; "listed": those in layer_types
    window: int | None = None  # the window if the config has no sliding_window
    may_slide: bool = False  # use_sliding_window is read: without it there is no window
    slides_every: int = 0  # without layer_types, every N-th layer attends to all tokens, the others to a window
    slides_late: bool = False  # without layer_types, layers from max_window_layers on have the window
    slides_early: bool = False  # without layer_types, every other layer before max_window_layers has the window
    bias: Literal["", "qkv", "all"] = "all"  # the biases that attention_bias turns on; "": it is not read
    always_biased: bool = False
    may_bias_ffn: bool = False  # mlp_bias is read
    sinks: bool = False  # each query head has a sink logit in the softmax
    may_norm: str = ""  # the key that turns on norms of each query and key head
    rotates_part: bool = False  # partial_rotary_factor is read
    rotated: float = 1.0  # default of partial_rotary_factor
    rope: Defaults = field(default_factory=dict)  # default of rope_parameters: YaRN
    local_theta: bool = False  # layers with a window have their own theta, rope_local_base_freq
    skips_rotation: int = 0  # without no_rope_layers, every N-th layer has no RoPE
    scale: str = ""  # the key of the scale of attention scores, or of the number whose square root divides them
    softcap: bool = False  # attn_logit_softcapping is read
    linear: Literal["", "qwen", "kimi"] = ""  # has linear attention layers, whose sizes have Qwen's or Kimi's names
    rotates: bool = True  # queries and keys have RoPE
    output_gate: bool = False  # the output of softmax attention is multiplied by a sigmoid gate
    renamed: Mapping[str, str] = field(default_factory=dict)  # key → name of the same key in other types
    norm: Literal["pre", "post", "sandwich"] = "pre"
    shared_gate: bool = False  # one shared expert, gated, with its own width
    scales_embedding: bool = False  # embeddings are multiplied by √hidden
    caps_logits: bool = False  # final_logit_softcapping is read
    streams: bool = False  # several residual streams, hc_mult
    multiplies: bool = False  # embeddings, the residual stream and logits have multipliers
    acts: bool = True  # hidden_act or hidden_activation is read
    gate: Literal["", "sigmoid"] = ""  # the score function, if scoring_func and topk_method are not read
    lists_ffn: bool = False  # mlp_layer_types is read
    indexes: bool = False  # index_n_heads, index_head_dim and index_topk are read


# The defaults are those of the configuration classes of `transformers` 5.23; a test compares them. What those classes
# lack (the balancing loss, scores, the choice of groups; the types `deepseek` and `kimi_k2`) follows
# DeepSeek's configuration_deepseek.py, published with the weights; Kimi K2's file is a copy of DeepSeek-V3's.
# Sizes have no default here: a config without them is refused.
_ALL: Defaults = {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_DEEPSEEK: Defaults = {
    **_ALL,
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "aux_loss_alpha": 0.001,
}
_DEEPSEEK_V2: Defaults = {**_DEEPSEEK, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
_DEEPSEEK_V3: Defaults = {
    **_DEEPSEEK,
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_nextn_predict_layers": 1,
}
_DEEPSEEK_V32: Defaults = {
    **_DEEPSEEK_V3,
    "max_position_embeddings": 163_840,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_DEEPSEEK_V4: Defaults = {
    **_ALL,
    "max_position_embeddings": 1_048_576,
    "sliding_window": 128,
    "compress_rope_theta": 160_000.0,
    "scoring_func": "sqrtsoftplus",
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "router_aux_loss_coef": 0.001,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 1,
}
_LLAMA: Defaults = {**_ALL, "num_key_value_heads": None, "max_position_embeddings": 2048}
_MISTRAL: Defaults = {**_ALL, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_MIXTRAL: Defaults = {**_MISTRAL, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.001}
_QWEN3: Defaults = {**_ALL, "num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128}
_QWEN3_MOE: Defaults = {
    **_ALL,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_QWEN2: Defaults = {**_ALL, "num_key_value_heads": 32, "max_position_embeddings": 32_768}
_OLMOE: Defaults = {
    **_ALL,
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}
_GLM4_MOE: Defaults = {
    **_ALL,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
_OLMO2: Defaults = {**_LLAMA, "rms_norm_eps": 1e-5}
_GRANITE: Defaults = {
    **_LLAMA,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GEMMA2: Defaults = {
    **_ALL,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Defaults = {
    **{key: value for key, value in _GEMMA2.items() if key != "attn_logit_softcapping"},  # its class does not read it
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
}
_SMOLLM3: Defaults = {
    **_ALL,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
}
_GPT_OSS: Defaults = {
    **_ALL,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "router_aux_loss_coef": 0.001,
}
_YARN_OF_GPT_OSS: Defaults = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_QWEN3_NEXT: Defaults = {
    **_ALL,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "linear_conv_kernel_dim": 4,
}
_KIMI_LINEAR: Defaults = {
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "model_max_length": 1_048_576,
    "first_k_dense_replace": 1,
    "linear_conv_kernel_dim": 4,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 1,
    "topk_group": 1,
}
_KEYS_OF_KIMI_LINEAR: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_QWEN2_MOE: Defaults = {**_QWEN3_MOE, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632}
FAMILIES = {
    "deepseek": ConfigFamily("gqa", "deepseek", _DEEPSEEK),
    "deepseek_v2": ConfigFamily("mla", "deepseek", _DEEPSEEK_V2),
    "deepseek_v3": ConfigFamily("mla", "deepseek", _DEEPSEEK_V3),
    "deepseek_v32": ConfigFamily("mla", "deepseek", _DEEPSEEK_V32, lists_ffn=True, indexes=True),
    "deepseek_v4": ConfigFamily("compressed", "deepseek_v4", _DEEPSEEK_V4, streams=True),
    "gemma2": ConfigFamily(
        *("gqa", "dense", _GEMMA2),
        windows="listed",
        window=4096,
        slides_every=2,
        scale="query_pre_attn_scalar",
        softcap=True,
        norm="sandwich",
        scales_embedding=True,
        caps_logits=True,
    ),
    "gemma3_text": ConfigFamily(
        *("gqa", "dense", _GEMMA3),
        qk_norm="head",
        windows="listed",
        window=4096,
        slides_every=6,
        local_theta=True,
        scale="query_pre_attn_scalar",
        norm="sandwich",
        scales_embedding=True,
        caps_logits=True,
    ),
    "glm4_moe": ConfigFamily(
        *("gqa", "deepseek", _GLM4_MOE),
        bias="qkv",
        may_norm="use_qk_norm",
        rotates_part=True,
        rotated=0.5,
        gate="sigmoid",
    ),
    "gpt_oss": ConfigFamily(
        *("gqa", "gpt_oss", _GPT_OSS),
        windows="listed",
        window=128,
        slides_every=2,
        sinks=True,
        rope=_YARN_OF_GPT_OSS,
        acts=False,
    ),
    "granite": ConfigFamily("gqa", "dense", _GRANITE, scale="attention_multiplier", multiplies=True, may_bias_ffn=True),
    "kimi_k2": ConfigFamily("mla", "deepseek", _DEEPSEEK_V3),
    "kimi_linear": ConfigFamily(
        *("mla", "deepseek", _KIMI_LINEAR),
        linear="kimi",
        rotates=False,
        lists_ffn=True,
        renamed=_KEYS_OF_KIMI_LINEAR,
    ),
    "llama": ConfigFamily("gqa", "dense", _LLAMA, may_bias_ffn=True),
    "mistral": ConfigFamily("gqa", "dense", _MISTRAL, windows="listed", window=4096, bias=""),
    "mixtral": ConfigFamily("gqa", "mixtral", _MIXTRAL, windows="all", bias=""),
    "olmo2": ConfigFamily("gqa", "dense", _OLMO2, qk_norm="width", norm="post"),
    "olmoe": ConfigFamily("gqa", "olmoe", _OLMOE, qk_norm="width"),
    "qwen2": ConfigFamily(
        *("gqa", "dense", _QWEN2),
        windows="listed",
        window=4096,
        may_slide=True,
        slides_late=True,
        bias="qkv",
        always_biased=True,
    ),
    "qwen2_moe": ConfigFamily(
        *("gqa", "qwen", _QWEN2_MOE),
        windows="listed",
        window=4096,
        may_slide=True,
        slides_early=True,
        bias="qkv",
        always_biased=True,
        shared_gate=True,
    ),
    "qwen3": ConfigFamily(
        *("gqa", "dense", _QWEN3),
        qk_norm="head",
        windows="listed",
        window=4096,
        may_slide=True,
        slides_late=True,
    ),
    "qwen3_moe": ConfigFamily("gqa", "qwen", _QWEN3_MOE, qk_norm="head", windows="all", window=4096, may_slide=True),
    "qwen3_next": ConfigFamily(
        *("gqa", "qwen", _QWEN3_NEXT),
        qk_norm="head",
        rotates_part=True,
        rotated=0.25,
        shared_gate=True,
        linear="qwen",
        output_gate=True,
    ),
    "smollm3": ConfigFamily(
        "gqa", "dense", _SMOLLM3, windows="listed", may_slide=True, skips_rotation=4, may_bias_ffn=True
    ),
}

# model types that a spec cannot describe → why
OTHER_TYPES = {
    "deepseek_vl_v2": "images",
    "gemma": "norm gains stored as their difference from 1",
    "gpt2": "learned positions, LayerNorm and biases",
    "gpt_neox": "LayerNorm, biases and parallel blocks",
    "kimi_k25": "images; its `text_config` is a separate model",
    "kimi_vl": "images; its `text_config` is a separate model",
    "llama4": "images and chunked attention",
    "llama4_text": "chunked attention, and layers without rotation",
    "phi3": "fused projections and long-context factors",
    "qwen3_vl_moe": "images; its `text_config` is a separate model",
}
