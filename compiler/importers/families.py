"""The model types of Hugging Face configurations: what a silent config means, and which types are out of reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """What a model type means where its config is silent."""

    attention: Literal["mla", "gqa"]
    ffn: Literal["dense", "deepseek", "qwen", "mixtral"]
    score: Literal["sigmoid", "softmax"] = "softmax"
    method: str = "greedy"
    qk_norm: bool = False
    head_dim: int | None = None  # None: hidden / heads
    theta: float = 10_000.0
    norm_eps: float = 1e-6
    window: int | None = None  # of a config that does not mention sliding_window
    slides: bool = True  # a window is used where use_sliding_window is not mentioned


FAMILIES = {
    "deepseek": Family("gqa", "deepseek"),
    "deepseek_v2": Family("mla", "deepseek"),
    "deepseek_v3": Family("mla", "deepseek", "sigmoid", "noaux_tc"),
    "kimi_k2": Family("mla", "deepseek", "sigmoid", "noaux_tc"),
    "llama": Family("gqa", "dense"),
    "mistral": Family("gqa", "dense", window=4096),
    "mixtral": Family("gqa", "mixtral", theta=1e6, norm_eps=1e-5),
    "qwen3": Family("gqa", "dense", qk_norm=True, head_dim=128, slides=False),
    "qwen3_moe": Family("gqa", "qwen", qk_norm=True, slides=False),
}

# model types that a spec cannot describe, and what is in the way
OTHER_TYPES = {
    "deepseek_v32": "attention to tokens that an indexer chooses",
    "deepseek_v4": "compressed and sparse attention",
    "deepseek_vl_v2": "images",
    "gemma": "tied embeddings and GeGLU",
    "gemma2": "sliding windows, bent logits and norms after each block",
    "gemma3_text": "sliding windows and norms after each block",
    "glm4_moe": "a rotation of half of each head, and biases",
    "gpt2": "learned positions, LayerNorm and biases",
    "gpt_neox": "LayerNorm, biases and parallel blocks",
    "gpt_oss": "attention sinks, sliding windows and biases",
    "kimi_k25": "images; its `text_config` is a model of its own",
    "kimi_linear": "linear attention",
    "kimi_vl": "images; its `text_config` is a model of its own",
    "llama4": "images and chunked attention",
    "llama4_text": "chunked attention, and layers without rotation",
    "phi3": "fused projections and long-context factors",
    "qwen2": "biases on queries, keys and values",
    "qwen2_moe": "biases on queries, keys and values, and a gate before the shared expert",
    "qwen3_next": "linear attention and a gate before the shared expert",
    "qwen3_vl_moe": "images; its `text_config` is a model of its own",
}
