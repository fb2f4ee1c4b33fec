"""The configuration of a model as one of DeepSeek-V4: `compiler/tools/importers/deepseek_v4.py` in the other
direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compiler.tools.importers.deepseek_v4 import CSA, HCA, SCORE, SCORES, TABLE, WINDOW
from dsl.schema import Compressed, Csa, Hca, Model, Moe, Rope

Config = dict[str, Any]


def attention_keys(model: Model, rotation: Callable[[Rope | None, Mapping[str, float]], Config]) -> Config:
    """What each layer attends to. `rotation`: the keys of a rotation."""
    layers = [each for each in map(model.attention_of, range(model.num_layers)) if isinstance(each, Compressed)]
    first = layers[0]
    share = {"partial_rotary_factor": (first.rope.width or first.head_dim) / first.head_dim if first.rope else 1.0}
    found = {kind: [each for each in layers if _kind(each) == kind] for kind in (WINDOW, CSA, HCA)}
    indexer = next((each.compress.indexer for each in found[CSA] if isinstance(each.compress, Csa)), None)
    ropes = {
        "main": next((each.rope for each in found[WINDOW]), None),
        "compress": next((each.rope for each in (*found[CSA], *found[HCA])), None),
    }
    return {
        "num_attention_heads": first.heads,
        "num_key_value_heads": 1,
        "head_dim": first.head_dim,
        "q_lora_rank": first.query_rank,
        "sliding_window": first.window,
        "o_groups": first.groups,
        "o_lora_rank": first.out_rank,
        "layer_types": [_kind(each) for each in layers],
        "compress_rates": {
            kind: next((each.compress.rate for each in found[kind] if each.compress), usual)
            for kind, usual in ((CSA, 4), (HCA, 128))
        },
        **(
            {"index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.top_k}
            if indexer
            else {}
        ),
        **share,
        "rope_theta": ropes["main"].theta if ropes["main"] else 10_000.0,
        "compress_rope_theta": ropes["compress"].theta if ropes["compress"] else 160_000.0,
        "rope_parameters": {
            name: rotation(rope or Rope(theta=10_000.0), share)["rope_parameters"] for name, rope in ropes.items()
        },
        **_streams(model),
    }


def _kind(attention: Compressed) -> str:
    if attention.compress is None:
        return WINDOW
    return HCA if isinstance(attention.compress, Hca) else CSA


def _streams(model: Model) -> Config:
    hyper = model.hyper_connections
    return {"hc_mult": hyper.streams, "hc_sinkhorn_iters": hyper.rounds, "hc_eps": hyper.eps} if hyper else {}


def expert_keys(model: Model, moe: Moe | None) -> Config:
    """How experts are chosen."""
    if moe is None:
        return {}
    layers = [each for each in map(model.ffn, range(model.num_layers)) if isinstance(each, Moe)]
    by_scores = next((each for each in layers if each.choice == "scores"), moe)
    return {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.inner,
        "mlp_layer_types": [TABLE if each.choice == "table" else SCORES for each in layers],
        "scoring_func": next(theirs for theirs, ours in SCORE.items() if ours == moe.score),
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "router_aux_loss_coef": by_scores.balance.sequence_loss,
        **({"swiglu_limit": moe.clamp.limit} if moe.clamp else {}),
        "num_nextn_predict_layers": model.mtp.depth if model.mtp else 0,
    }
