"""The published form of each model type, used by `dsc import hf` and `dsc export hf`.

A row has the class name, the order of rotated columns, tensor names that differ from those of DeepSeek and Llama
(compiler/tools/weights/tensors.py), and features that the class in `transformers` 5.23 fixes regardless of the config.
The config keys and their defaults are in compiler/tools/importers/families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class PublishedFamily:
    """The published form of a model type."""

    architecture: str
    rotates: Literal["pairs", "halves"]  # rotated pairs are adjacent columns, or half of the rotated width apart
    names: Names = field(default_factory=dict)  # tensor names of a block that override the common ones
    ends: Mapping[str, str] = field(default_factory=dict)  # the same for tensors outside of blocks
    fixed: Mapping[str, object] = field(default_factory=dict)  # MoE settings that the class does not read, with values
    linear: Names = field(default_factory=dict)  # tensor names of a linear-attention block, which replace all others
    gains_from_one: bool = False  # norm gains are published as their differences from 1
    predicts: bool = False  # has tensors of multi-token prediction
    reads_order: bool = False  # rope_interleave is read: false means halves
    remote: bool = False  # `transformers` needs the code published with the weights


_MIXTRAL: Names = {
    "ffn.router.weight": ("block_sparse_moe.gate.weight",),
    "ffn.experts.*.up": ("block_sparse_moe.experts.*.w1.weight", "block_sparse_moe.experts.*.w3.weight"),
    "ffn.experts.*.down": ("block_sparse_moe.experts.*.w2.weight",),
}
_OLMO2: Names = {  # norms after attention and after the feed-forward layer
    "attention.post_norm": ("post_attention_layernorm.weight",),
    "ffn.post_norm": ("post_feedforward_layernorm.weight",),
}
_QWEN2_MOE: Names = {
    "ffn.shared.up": ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    "ffn.shared.gate": ("mlp.shared_expert_gate.weight",),
    "ffn.shared.down": ("mlp.shared_expert.down_proj.weight",),
}
_SANDWICH: Names = {  # norms before and after attention and the feed-forward layer
    "attention.post_norm": ("post_attention_layernorm.weight",),
    "ffn.norm": ("pre_feedforward_layernorm.weight",),
    "ffn.post_norm": ("post_feedforward_layernorm.weight",),
}
_GPT_OSS: Names = {  # all experts of a layer are in one tensor
    "ffn.router.weight": ("mlp.router.weight",),
    "ffn.router.logit_bias": ("mlp.router.bias",),
    "ffn.experts.*.up": ("mlp.experts.gate_up_proj",),
    "ffn.experts.*.up_bias": ("mlp.experts.gate_up_proj_bias",),
    "ffn.experts.*.down": ("mlp.experts.down_proj",),
    "ffn.experts.*.down_bias": ("mlp.experts.down_proj_bias",),
}
# A name that occurs twice is one tensor that holds the rows of both, interleaved by key head.
_QWEN3_NEXT: Names = {
    "attention.qkv": ("linear_attn.in_proj_qkvz.weight",),
    "attention.gate": ("linear_attn.in_proj_qkvz.weight",),
    "attention.beta": ("linear_attn.in_proj_ba.weight",),
    "attention.decay": ("linear_attn.in_proj_ba.weight",),
    "attention.convolution": ("linear_attn.conv1d.weight",),
    "attention.decay_bias": ("linear_attn.dt_bias",),
    "attention.decay_rate": ("linear_attn.A_log",),
    "attention.out_norm": ("linear_attn.norm.weight",),
    "attention.out": ("linear_attn.out_proj.weight",),
}
_KDA: Names = {
    "attention.qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.convolution": ("self_attn.q_conv1d.weight", "self_attn.k_conv1d.weight", "self_attn.v_conv1d.weight"),
    "attention.beta": ("self_attn.b_proj.weight",),
    "attention.decay_down": ("self_attn.f_a_proj.weight",),
    "attention.decay": ("self_attn.f_b_proj.weight",),
    "attention.decay_bias": ("self_attn.dt_bias",),
    "attention.decay_rate": ("self_attn.A_log",),
    "attention.gate_down": ("self_attn.g_a_proj.weight",),
    "attention.gate": ("self_attn.g_b_proj.weight",),
    "attention.out_norm": ("self_attn.o_norm.weight",),
    "attention.out": ("self_attn.o_proj.weight",),
}
_KIMI_LINEAR: Names = {
    **_MIXTRAL,
    "ffn.router.bias": ("block_sparse_moe.gate.e_score_correction_bias",),
    "ffn.shared.up": (
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "block_sparse_moe.shared_experts.up_proj.weight",
    ),
    "ffn.shared.down": ("block_sparse_moe.shared_experts.down_proj.weight",),
}
_DEEPSEEK_V4: Names = {
    "attention.norm": ("attn_norm.weight",),
    "attention.q_down": ("attn.wq_a.weight",),
    "attention.q_norm": ("attn.q_norm.weight",),
    "attention.q_up": ("attn.wq_b.weight",),
    "attention.kv": ("attn.wkv.weight",),
    "attention.kv_norm": ("attn.norm.weight",),
    "attention.pool": ("attn.compressor.wkv.weight", "attn.compressor.wgate.weight"),
    "attention.pool_bias": ("attn.compressor.ape",),
    "attention.pool_norm": ("attn.compressor.norm.weight",),
    "attention.indexer.q": ("attn.indexer.wq_b.weight",),
    "attention.indexer.pool": ("attn.indexer.compressor.wkv.weight", "attn.indexer.compressor.wgate.weight"),
    "attention.indexer.pool_bias": ("attn.indexer.compressor.ape",),
    "attention.indexer.pool_norm": ("attn.indexer.compressor.norm.weight",),
    "attention.indexer.weights": ("attn.indexer.weights_proj.weight",),
    "attention.sinks": ("attn.attn_sink",),
    "attention.group_out": ("attn.wo_a.weight",),
    "attention.out": ("attn.wo_b.weight",),
    "ffn.norm": ("ffn_norm.weight",),
    "ffn.router.weight": ("ffn.gate.weight",),
    "ffn.router.bias": ("ffn.gate.bias",),
    "ffn.router.table": ("ffn.gate.tid2eid",),
    "ffn.shared.up": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
    "ffn.shared.down": ("ffn.shared_experts.w2.weight",),
    "ffn.experts.*.up": ("ffn.experts.*.w1.weight", "ffn.experts.*.w3.weight"),
    "ffn.experts.*.down": ("ffn.experts.*.w2.weight",),
    **{
        f"{part}_hyper.{name}": (f"hc_{theirs}_{name}",)
        for part, theirs in (("attention", "attn"), ("ffn", "ffn"))
        for name in ("fn", "base", "scale")
    },
}
_ENDS_OF_V4 = {"head": "head.weight"} | {
    f"final_hyper.{name}": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")
}
_SIGMOID = {"score": "sigmoid"}

# A model is published in the family that it was imported from if that describes it, else in the first one that does.
FAMILIES: Mapping[str, PublishedFamily] = {
    "deepseek_v3": PublishedFamily("DeepseekV3ForCausalLM", "pairs", fixed=_SIGMOID, predicts=True, reads_order=True),
    "deepseek_v32": PublishedFamily("DeepseekV32ForCausalLM", "pairs", fixed=_SIGMOID, predicts=True),
    "deepseek_v2": PublishedFamily("DeepseekV2ForCausalLM", "pairs", fixed={"score": "softmax", "normalize": False}),
    "llama": PublishedFamily("LlamaForCausalLM", "halves"),
    "qwen2": PublishedFamily("Qwen2ForCausalLM", "halves"),
    "mistral": PublishedFamily("MistralForCausalLM", "halves"),
    "qwen3": PublishedFamily("Qwen3ForCausalLM", "halves"),
    "mixtral": PublishedFamily("MixtralForCausalLM", "halves", _MIXTRAL),
    "qwen3_moe": PublishedFamily("Qwen3MoeForCausalLM", "halves"),
    "olmo2": PublishedFamily("Olmo2ForCausalLM", "halves", _OLMO2),
    "qwen2_moe": PublishedFamily("Qwen2MoeForCausalLM", "halves", _QWEN2_MOE),
    "olmoe": PublishedFamily("OlmoeForCausalLM", "halves"),
    "glm4_moe": PublishedFamily("Glm4MoeForCausalLM", "halves", fixed=_SIGMOID, predicts=True),
    "gemma2": PublishedFamily("Gemma2ForCausalLM", "halves", _SANDWICH, gains_from_one=True),
    "gemma3_text": PublishedFamily("Gemma3ForCausalLM", "halves", _SANDWICH, gains_from_one=True),
    "gpt_oss": PublishedFamily("GptOssForCausalLM", "halves", _GPT_OSS),
    "qwen3_next": PublishedFamily(
        "Qwen3NextForCausalLM", "halves", _QWEN2_MOE, linear=_QWEN3_NEXT, gains_from_one=True
    ),
    "kimi_linear": PublishedFamily("KimiLinearForCausalLM", "pairs", _KIMI_LINEAR, fixed=_SIGMOID, linear=_KDA),
    "granite": PublishedFamily("GraniteForCausalLM", "halves"),
    "smollm3": PublishedFamily("SmolLM3ForCausalLM", "halves"),
    "kimi_k2": PublishedFamily(
        "DeepseekV3ForCausalLM", "pairs", fixed=_SIGMOID, predicts=True, reads_order=True, remote=True
    ),
    "deepseek_v4": PublishedFamily("DeepseekV4ForCausalLM", "pairs", _DEEPSEEK_V4, _ENDS_OF_V4),
    "deepseek": PublishedFamily("DeepseekForCausalLM", "halves", fixed={"score": "softmax"}, remote=True),
}
