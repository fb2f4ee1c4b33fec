"""Our weights in `transformers`, an independent implementation to compare logits with.

Nothing is downloaded: the configuration is written in code. Its router and norms compute in float32 whatever the
weights are, so the comparison is one in float32.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2RMSNorm
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from tests.reference.config import Balance, Config, Dense, Gqa, Mla, Moe

Model = TypeVar("Model", bound=torch.nn.Module)


def to_transformers(logical: dict[str, Tensor], config: Config) -> PreTrainedModel:
    """The main model in float32, from tensors by logical name (those of MTP are left out)."""
    theirs = transformers_config(config)
    model = FAMILIES[type(theirs)](theirs)
    state = {
        "model.embed_tokens.weight": logical["embedding"],
        "model.norm.weight": logical["final_norm"],
        "lm_head.weight": logical["head"],
    }
    for i, ffn in enumerate(config.layers):
        state |= _block(logical, f"layers.{i}", f"model.layers.{i}", config, ffn)
    return _load(model, state, config)


def to_transformers_mtp(logical: dict[str, Tensor], config: Config, main: PreTrainedModel) -> MtpModel:
    """The MTP module of DeepSeek-V3 in float32; it shares embedding and head of `main`."""
    model = MtpModel(main, num_mtp_layers=1)
    state = {f"layers.0.{theirs}.weight": logical[f"mtp.0.{ours}"] for ours, theirs in MTP_NAMES.items()}
    state |= _block(logical, "mtp.0", "layers.0.mtp_block", config, config.layers[-1])
    shared = {"embed_tokens.weight": logical["embedding"], "shared_head.weight": logical["head"]}
    return _load(model, state | shared, config)


@torch.no_grad()
def transformers_logits(
    logical: dict[str, Tensor], config: Config, tokens_BS: Tensor, mtp_tokens_BS: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits [B, S, V] of the main model and of its MTP module (None without mtp_tokens_BS), float32."""
    main = to_transformers(logical, config)
    output = main(input_ids=tokens_BS, output_hidden_states=True, use_cache=False)
    if mtp_tokens_BS is None:
        return output.logits, None
    mtp = to_transformers_mtp(logical, config, main)
    # In decoding, this module's positions run one ahead of the main model's; RoPE sees differences only.
    position_BS = torch.arange(1, tokens_BS.shape[1] + 1).expand_as(tokens_BS)
    hidden_BSD = mtp.forward_layer(0, output.hidden_states[-1], position_BS, None, input_ids=mtp_tokens_BS)
    return output.logits, mtp.shared_head(hidden_BSD)


def transformers_config(config: Config) -> PretrainedConfig:
    """The config of the family that has this attention and this gate. Its layers are equal dense ones, then equal MoE
    ones; a model of any other shape is refused."""
    dense = [ffn for ffn in config.layers if isinstance(ffn, Dense)]
    moe = [replace(ffn, balance=Balance(None, 0.0)) for ffn in config.layers if isinstance(ffn, Moe)]
    assert all(isinstance(ffn, Dense) for ffn in config.layers[: len(dense)]), "a dense layer after an MoE layer"
    assert len(set(dense)) <= 1 and len(set(moe)) <= 1, "layers of one kind differ"
    keys: dict[str, Any] = dict(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        num_hidden_layers=len(config.layers),
        num_attention_heads=config.attention.heads,
        rope_parameters=rope_parameters(config.attention),
        max_position_embeddings=config.sequence,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=torch.float32,
    )
    if dense:
        keys["intermediate_size"] = dense[0].inner
    ffn = moe[0] if moe else None
    if isinstance(config.attention, Gqa):
        return _grouped(config.attention, ffn, len(dense), keys)
    return _latent(config, config.attention, ffn, len(dense), keys)


def _latent(config: Config, attention: Mla, moe: Moe | None, num_dense: int, keys: dict[str, Any]) -> PretrainedConfig:
    """DeepSeek-V3, or -V2 if the scores are of a softmax."""
    keys |= dict(
        first_k_dense_replace=num_dense,
        num_key_value_heads=attention.heads,
        q_lora_rank=attention.query_rank,
        kv_lora_rank=attention.kv_rank,
        qk_nope_head_dim=attention.head_dim.nope,
        qk_rope_head_dim=attention.head_dim.rope,
        v_head_dim=attention.head_dim.value,
    )
    if moe:
        keys |= dict(
            n_routed_experts=moe.experts,
            n_shared_experts=moe.shared,
            num_experts_per_tok=moe.top_k,
            moe_intermediate_size=moe.inner,
            n_group=moe.groups,
            topk_group=moe.top_groups,
            norm_topk_prob=moe.normalize,
            routed_scaling_factor=float(moe.scale),
        )
    if moe and moe.score == "softmax":
        assert not moe.normalize and config.mtp is None, "theirs knows neither"
        return DeepseekV2Config(topk_method="greedy" if moe.groups == 1 else "group_limited_greedy", **keys)
    return DeepseekV3Config(rope_interleave=True, num_mtp_layers=0 if config.mtp is None else 1, **keys)


def rope_parameters(attention: Gqa | Mla) -> dict[str, Any]:
    """The rotation as in their configurations."""
    rope = attention.rope
    if rope is None:
        return {"rope_type": "default", "rope_theta": 10_000.0}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rope.theta)}
    if rope.width is not None:
        assert isinstance(attention, Gqa)
        parameters["partial_rotary_factor"] = rope.width / attention.head_dim
    if rope.scaling is None:
        return parameters
    scaling = asdict(rope.scaling)
    kind, original = scaling.pop("kind"), scaling.pop("original")
    names = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    }[kind]
    parameters |= {"rope_type": kind, "factor": scaling["factor"]}
    parameters |= {name: scaling[name] for name in names if scaling[name] is not None}
    return parameters | ({} if kind == "linear" else {"original_max_position_embeddings": original})


def _grouped(attention: Gqa, moe: Moe | None, num_dense: int, keys: dict[str, Any]) -> PretrainedConfig:
    """For dense models Llama, Qwen2, SmolLM3 or Mistral, by the options of attention; else Qwen3-MoE,
    GLM-4.5 or OLMoE."""
    assert attention.scale is None and not attention.sinks and attention.softcap is None, "theirs have none of these"
    keys |= dict(num_key_value_heads=attention.kv_heads, head_dim=attention.head_dim)
    if moe is None:
        assert not attention.qk_norm, "theirs norms nothing"
        return _dense(attention, keys)
    gate = (moe.score, moe.shared, moe.groups, moe.scale)
    if moe.score == "sigmoid":
        assert attention.bias != "all" and attention.qk_norm != "width", "theirs knows neither"
        return Glm4MoeConfig(
            first_k_dense_replace=num_dense,
            n_routed_experts=moe.experts,
            n_shared_experts=moe.shared,
            num_experts_per_tok=moe.top_k,
            moe_intermediate_size=moe.inner,
            n_group=moe.groups,
            topk_group=moe.top_groups,
            norm_topk_prob=moe.normalize,
            routed_scaling_factor=float(moe.scale),
            attention_bias=attention.bias == "qkv",
            use_qk_norm=attention.qk_norm == "head",
            num_mtp_layers=0,
            **keys,
        )
    assert attention.bias is None and gate == ("softmax", 0, 1, 1.0), "theirs knows no other gate"
    if attention.qk_norm == "width":
        assert num_dense == 0, "theirs has no dense layer"
        experts = dict(num_experts=moe.experts, num_experts_per_tok=moe.top_k, intermediate_size=moe.inner)
        return OlmoeConfig(**keys | experts, norm_topk_prob=moe.normalize)
    assert attention.qk_norm, "theirs norms them"
    return Qwen3MoeConfig(
        num_experts=moe.experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.inner,
        norm_topk_prob=moe.normalize,
        mlp_only_layers=list(range(num_dense)),
        **keys,
    )


def _dense(attention: Gqa, keys: dict[str, Any]) -> PretrainedConfig:
    assert attention.window is None or attention.bias is None, "theirs has one of them"
    if attention.window is not None:
        return MistralConfig(sliding_window=attention.window, **keys)
    if attention.rope is None:
        return SmolLM3Config(no_rope_layers=[0] * keys["num_hidden_layers"], pad_token_id=None, **keys)
    if attention.bias == "qkv":
        return Qwen2Config(**keys)
    return LlamaConfig(attention_bias=attention.bias == "all", **keys)


FAMILIES: dict[type[PretrainedConfig], type[PreTrainedModel]] = {
    DeepseekV2Config: DeepseekV2ForCausalLM,
    DeepseekV3Config: DeepseekV3ForCausalLM,
    Glm4MoeConfig: Glm4MoeForCausalLM,
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    OlmoeConfig: OlmoeForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
    SmolLM3Config: SmolLM3ForCausalLM,
}
MTP_NAMES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "post_norm",
}
ATTENTION_NAMES = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}


def _block(logical: dict[str, Tensor], ours: str, theirs: str, config: Config, ffn: Dense | Moe) -> dict[str, Tensor]:
    """The tensors of one block, from under the prefix `ours` to under the prefix `theirs`."""
    state = {
        f"{theirs}.input_layernorm.weight": logical[f"{ours}.attention.norm"],
        f"{theirs}.post_attention_layernorm.weight": logical[f"{ours}.ffn.norm"],
    }
    state |= _attention(logical, f"{ours}.attention", f"{theirs}.self_attn", config.attention)
    if isinstance(ffn, Dense):
        return state | _swiglu(logical, f"{ours}.ffn", f"{theirs}.mlp")
    state[f"{theirs}.mlp.gate.weight"] = logical[f"{ours}.ffn.router.weight"]
    if ffn.score == "sigmoid":
        bias = logical.get(f"{ours}.ffn.router.bias", torch.zeros(ffn.experts))
        state[f"{theirs}.mlp.gate.e_score_correction_bias"] = bias
    for name, stacked in (("up", "gate_up_proj"), ("down", "down_proj")):
        experts = [logical[f"{ours}.ffn.experts.{e}.{name}"] for e in range(ffn.experts)]
        state[f"{theirs}.mlp.experts.{stacked}"] = torch.stack(experts)
    if isinstance(config.attention, Gqa) and ffn.score == "softmax":
        return state
    if ffn.shared == 0:  # theirs has an expert of width 0 then
        none = torch.zeros(0, config.hidden)
        logical = {f"{ours}.ffn.shared.up": none, f"{ours}.ffn.shared.down": none.T}
    return state | _swiglu(logical, f"{ours}.ffn.shared", f"{theirs}.mlp.shared_experts")


def _attention(logical: dict[str, Tensor], ours: str, theirs: str, attention: Mla | Gqa) -> dict[str, Tensor]:
    if isinstance(attention, Mla):
        query = ("q",) if attention.query_rank is None else ("q_down", "q_norm", "q_up")
        names = (*query, "kv_down", "kv_norm", "kv_up", "out")
        return {f"{theirs}.{ATTENTION_NAMES[name]}.weight": logical[f"{ours}.{name}"] for name in names}
    return grouped_tensors(logical, ours, theirs, attention)


def grouped_tensors(logical: dict[str, Tensor], ours: str, theirs: str, attention: Gqa) -> dict[str, Tensor]:
    """The tensors of grouped-query attention. Our pairs are (2i, 2i + 1), theirs (i, i + W/2), of the columns that are
    rotated: rows of queries and keys move."""
    rotated = attention.rope.width or attention.head_dim if attention.rope else 0
    in_halves = torch.arange(attention.head_dim)
    in_halves[:rotated] = torch.arange(rotated).view(-1, 2).T.flatten()

    def moved(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, attention.head_dim))[:, in_halves].flatten(0, 1)

    parts = [n * attention.head_dim for n in (attention.heads, attention.kv_heads, attention.kv_heads)]
    state = {f"{theirs}.o_proj.weight": logical[f"{ours}.out"]}
    for kind in ("weight", *(("bias",) if attention.bias else ())):
        q, k, v = logical[f"{ours}.qkv" if kind == "weight" else f"{ours}.qkv_bias"].split(parts)
        state |= {
            f"{theirs}.q_proj.{kind}": moved(q),
            f"{theirs}.k_proj.{kind}": moved(k),
            f"{theirs}.v_proj.{kind}": v,
        }
    if attention.bias == "all":
        state[f"{theirs}.o_proj.bias"] = logical[f"{ours}.out_bias"]
    if attention.qk_norm:
        state |= {f"{theirs}.{name}.weight": moved(logical[f"{ours}.{name}"]) for name in ("q_norm", "k_norm")}
    if attention.sinks:
        state[f"{theirs}.sinks"] = logical[f"{ours}.sinks"]
    return state


def _swiglu(logical: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    gate, up = logical[f"{ours}.up"].chunk(2)
    return {
        f"{theirs}.gate_proj.weight": gate,
        f"{theirs}.up_proj.weight": up,
        f"{theirs}.down_proj.weight": logical[f"{ours}.down"],
    }


def _load(model: Model, state: dict[str, Tensor], config: Config) -> Model:
    model.load_state_dict({name: tensor.detach().float() for name, tensor in state.items()}, strict=True)
    for module in model.modules():
        # Their norms of the query and kv latents use 1e-6 for any configuration.
        if isinstance(module, DeepseekV3RMSNorm | DeepseekV2RMSNorm):
            module.variance_epsilon = config.norm_eps
    return model.eval()
