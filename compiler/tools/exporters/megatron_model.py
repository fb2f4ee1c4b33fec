"""A model as the arguments of Megatron-Bridge's `MLAModelProvider`, whose keys are those of Megatron-Core."""

from __future__ import annotations

from typing import Any

from compiler.tools.exporters.ledger import Ledger
from compiler.tools.exporters.planned import ExportError, latent_attention, layers_of, says_sizes
from compiler.tools.exporters.python_text import Code
from dsl.schema import Moe, Rope, Spec
from dsl.schema.rope import YarnScaling

SYSTEM = "megatron-bridge"
Settings = dict[str, Any]


def model_settings(spec: Spec, ledger: Ledger) -> Settings:
    """The arguments. ExportError for a model that Megatron's cannot be."""
    model, attention = spec.model, latent_attention(spec, SYSTEM)
    layers, mtp = layers_of(spec, SYSTEM), spec.model.mtp
    says_sizes(ledger)
    ledger.say("model.layers.*.ffn.kind", "model.layers.*.ffn.inner", "model.tied")
    if mtp is not None and len(mtp.weight) > 1:
        ledger.lose("model.mtp.weight", f"it has one value in Megatron: {mtp.weight[0].value:g}")
    ledger.say("model.mtp.*")
    dense = layers.dense_ffn or layers.moe
    assert dense is not None
    return {
        "transformer_layer_spec": Code("partial(get_gpt_decoder_block_spec, use_transformer_engine=True)"),
        "num_layers": layers.total,
        "hidden_size": model.hidden,
        "ffn_hidden_size": dense.inner,
        "vocab_size": model.vocab,
        "num_attention_heads": attention.heads,
        "kv_channels": attention.head_dim.nope + attention.head_dim.rope,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.head_dim.nope,
        "qk_pos_emb_head_dim": attention.head_dim.rope,
        "v_head_dim": attention.head_dim.value,
        "qk_layernorm": True,
        **_rope(attention.rope, ledger),
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "activation_func": Code("torch.nn.functional.silu"),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": model.init_std,
        "output_layer_init_method": Code(f"init_method_normal({model.init_std!r})"),
        "share_embeddings_and_output_weights": model.tied,
        "seq_length": spec.train.sequence,
        "mtp_num_layers": mtp.depth if mtp else None,
        **({"mtp_loss_scaling_factor": mtp.weight[0].value} if mtp else {}),
        **(_moe(layers.moe, layers.dense, layers.total, ledger) if layers.moe else {}),
    }


def _moe(moe: Moe, dense: int, total: int, ledger: Ledger) -> Settings:
    """The experts and their router."""
    if moe.score == "sqrt_softplus":
        raise ExportError(
            "Megatron-Core 0.16 has no scores sqrt_softplus", "write `score = sigmoid` or `score = softmax`"
        )
    for key in ("experts", "shared", "shared_inner", "shared_gate", "top_k", "score", "scale", "groups", "top_groups"):
        ledger.say(f"model.layers.*.ffn.{key}")
    ledger.lose("model.layers.*.ffn.max_nodes", "groups of experts bound the nodes of a token here too", changes=False)
    if moe.groups > 1 and moe.top_k // moe.top_groups != (1 if moe.score == "softmax" else 2):
        why = f"Megatron scores a group by the sum of its {moe.top_k // moe.top_groups} best experts"
        ledger.note("model.layers.*.ffn.top_groups", str(moe.top_groups), why)
    if moe.score == "sigmoid" and moe.top_k > 1 and not moe.normalize:
        ledger.lose("model.layers.*.ffn.normalize", "Megatron divides sigmoid scores by their sum")
    ledger.say("model.layers.*.ffn.normalize")
    rate = moe.balance.bias_rate
    if rate is not None and len(rate) > 1:
        ledger.lose("model.layers.*.ffn.balance.bias_rate", f"it has one value in Megatron: {rate[0].value:g}")
    if rate is not None and moe.score != "sigmoid":
        ledger.lose("model.layers.*.ffn.balance.bias_rate", "Megatron has a bias with sigmoid scores alone")
        rate = None
    ledger.say("model.layers.*.ffn.balance.*")
    shared = moe.shared * (moe.shared_inner or moe.inner)
    groups = {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.top_groups} if moe.groups > 1 else {}
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.inner,
        "moe_layer_freq": Code(f"[0] * {dense} + [1] * {total - dense}"),
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_topk": moe.top_k,
        **groups,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "sigmoid" or not moe.normalize,
        "moe_router_topk_scaling_factor": moe.scale,
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": rate is not None,
        "moe_router_bias_update_rate": rate[0].value if rate else 0.0,
        "moe_router_load_balancing_type": "seq_aux_loss" if moe.balance.sequence_loss else "none",
        "moe_aux_loss_coeff": moe.balance.sequence_loss,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _rope(rope: Rope | None, ledger: Ledger) -> Settings:
    """The rotation. Without YaRN its factor is 1, which leaves the softmax scale alone."""
    if rope is None:
        raise ExportError("Megatron's latent attention rotates, this does not", "write `rope { theta = 10_000 }`")
    ledger.say("model.attention.rope.theta")
    said: Settings = {"rope_type": "rope", "position_embedding_type": "rope", "rotary_base": rope.theta}
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        if scaling is not None:
            ledger.lose("model.attention.rope.scaling.*", "Megatron's latent attention has YaRN alone")
        return said | {"rotary_scaling_factor": 1.0}
    both = scaling.mscale is not None and scaling.mscale_all_dim is not None
    if (
        scaling.attention_factor is not None
        or not scaling.truncate
        or (scaling.mscale_all_dim is not None and not both)
    ):
        why = "in Megatron sines have the factor m(mscale) / m(mscale_all_dim), and the ramp ends at whole pairs"
        ledger.lose("model.attention.rope.scaling.*", why)
    ledger.say("model.attention.rope.scaling.*")
    return said | {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale if both else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if both else 0.0,
    }
