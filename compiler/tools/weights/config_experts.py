"""The keys of a configuration that say how experts are chosen, for each kind of feed-forward part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler.tools.weights import config_v4
from dsl.schema import Dense, Model, Moe

Config = dict[str, Any]


def _no_experts(model: Model, moe: Moe | None) -> Config:
    return {}


def _deepseek(model: Model, moe: Moe | None) -> Config:
    dense = next((span.first for span in model.layers if isinstance(span.ffn, Moe)), model.num_layers)
    keys: Config = {"first_k_dense_replace": dense, "moe_layer_freq": 1}
    if moe is not None:
        softmax = "greedy" if moe.groups == 1 else "group_limited_greedy"
        keys |= {
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "n_group": moe.groups,
            "topk_group": moe.top_groups,
            "topk_method": "noaux_tc" if moe.score == "sigmoid" else softmax,
            "scoring_func": moe.score,
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
            "aux_loss_alpha": moe.balance.sequence_loss,
            "seq_aux": True,
        }
    return keys | {"num_nextn_predict_layers": model.mtp.depth if model.mtp else 0}


def _qwen(model: Model, moe: Moe | None) -> Config:
    dense = [layer for layer in range(model.num_layers) if isinstance(model.ffn(layer), Dense)]
    keys: Config = {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    if moe is not None:
        keys |= {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.inner,
            "norm_topk_prob": moe.normalize,
            "router_aux_loss_coef": moe.balance.sequence_loss,
        }
        if moe.shared:
            keys["shared_expert_intermediate_size"] = moe.shared * (moe.shared_inner or moe.inner)
    return keys


def _mixtral(model: Model, moe: Moe | None) -> Config:
    if moe is None:
        return {}
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.inner,
        "router_aux_loss_coef": moe.balance.sequence_loss,
    }


def _olmoe(model: Model, moe: Moe | None) -> Config:
    if moe is None:
        return {}
    keys = _qwen(model, moe)
    inner = keys.pop("moe_intermediate_size")
    return {key: keys[key] for key in keys if key not in ("mlp_only_layers", "decoder_sparse_step")} | {
        "intermediate_size": inner
    }


def _gpt_oss(model: Model, moe: Moe | None) -> Config:
    if moe is None or moe.clamp is None:
        return _mixtral(model, moe)
    return _mixtral(model, moe) | {"swiglu_limit": moe.clamp.limit, "swiglu_alpha": moe.clamp.alpha}


FFN_KEYS: Mapping[str, Callable[[Model, Moe | None], Config]] = {
    "dense": _no_experts,
    "deepseek": _deepseek,
    "deepseek_v4": config_v4.expert_keys,
    "qwen": _qwen,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
