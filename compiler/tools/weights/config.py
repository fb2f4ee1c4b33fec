"""Exports a model as config.json, and finds the family whose class computes it.

A family describes a model if importing the exported config gives the same model. So exporter and importer cannot
diverge, and the differences explain why a family does not fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from compiler.tools.importers import families as importable
from compiler.tools.importers import huggingface
from compiler.tools.importers.deepseek_v4 import CSA, HCA, SCORE, SCORES, TABLE, WINDOW
from compiler.tools.importers.ends import ACTIVATIONS
from compiler.tools.importers.json_text import parse
from compiler.tools.importers.layers import LINEAR
from compiler.tools.importers.rotation import FULL, SLIDING
from compiler.tools.weights.families import FAMILIES, PublishedFamily
from compiler.tools.weights.tensors import UnnamedError, experts_of, publish_tensors
from dsl.messages.diagnostics import Source
from dsl.schema import Compressed, Csa, Custom, DeltaNet, Dense, Gqa, Hca, Mla, Model, Moe
from dsl.schema.attention import Indexer
from dsl.schema.rotation import LinearScaling, Rope
from runtime.contract.weights import Format, PublishedTensor

# --- DeepSeek-V4 configs: the inverse of `compiler/tools/importers/deepseek_v4.py`

Config = dict[str, Any]


def attention_keys(model: Model, rotation: Callable[[Rope | None, Mapping[str, float]], Config]) -> Config:
    """The attention keys. `rotation`: returns the keys of a RoPE."""
    layers = [layer for layer in map(model.attention_of, range(model.num_layers)) if isinstance(layer, Compressed)]
    first = layers[0]
    share = {"partial_rotary_factor": (first.rope.width or first.head_dim) / first.head_dim if first.rope else 1.0}
    by_kind = {kind: [layer for layer in layers if _kind(layer) == kind] for kind in (WINDOW, CSA, HCA)}
    indexer = next((layer.compress.indexer for layer in by_kind[CSA] if isinstance(layer.compress, Csa)), None)
    ropes = {
        "main": next((layer.rope for layer in by_kind[WINDOW]), None),
        "compress": next((layer.rope for layer in (*by_kind[CSA], *by_kind[HCA])), None),
    }
    return {
        "num_attention_heads": first.heads,
        "num_key_value_heads": 1,
        "head_dim": first.head_dim,
        "q_lora_rank": first.query_rank,
        "sliding_window": first.window,
        "o_groups": first.groups,
        "o_lora_rank": first.out_rank,
        "layer_types": [_kind(layer) for layer in layers],
        "compress_rates": {
            kind: next((layer.compress.rate for layer in by_kind[kind] if layer.compress), usual)
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
    """The keys of MoE layers."""
    if moe is None:
        return {}
    layers = [layer for layer in map(model.ffn, range(model.num_layers)) if isinstance(layer, Moe)]
    by_scores = next((layer for layer in layers if layer.choice == "scores"), moe)
    return {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.inner,
        "mlp_layer_types": [TABLE if layer.choice == "table" else SCORES for layer in layers],
        "scoring_func": next(theirs for theirs, ours in SCORE.items() if ours == moe.score),
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "router_aux_loss_coef": by_scores.balance.sequence_loss,
        **({"swiglu_limit": moe.clamp.limit} if moe.clamp else {}),
        "num_nextn_predict_layers": model.mtp.depth if model.mtp else 0,
    }


# --- Feed-forward keys by family


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
    "deepseek_v4": expert_keys,
    "qwen": _qwen,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
# --- The config
TILE = 128  # rows and columns of an FP8 block, as in runtime/ops/quantise.py
DTYPES: Mapping[Format, str] = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}


@dataclass(frozen=True)
class Publication:
    """The published form of a model: its type, config and tensors."""

    model_type: str
    config: Config
    tensors: tuple[PublishedTensor, ...]

    @property
    def family(self) -> PublishedFamily:
        return FAMILIES[self.model_type]


UNREADABLE = "parts that its configuration cannot name"


class NoFamilyError(ValueError):
    """No family describes a model. The message says how the nearest one differs."""


def publication(model: Model, context: int, imported_as: str = "") -> Publication:
    """The published form of a model: in the family that it was imported from if that still describes it, else in the
    first family that does.

    `context`: tokens per sequence. Raises NoFamilyError.
    """
    refused: list[tuple[bool, int, str, list[str]]] = []
    usual = model.attention if isinstance(model.attention, Compressed) else _softmax(model)
    kind = "compressed" if isinstance(usual, Compressed) else "mla" if isinstance(usual, Mla) else "gqa"
    order = dict.fromkeys([*([imported_as] if imported_as in FAMILIES else []), *FAMILIES])
    for model_type in order:
        config = model_config(model, model_type, context)
        differences = _mismatches(model, model_type, config)
        if not differences:
            return Publication(model_type, config, publish_tensors(model, FAMILIES[model_type]))
        is_foreign = importable.FAMILIES[model_type].attention != kind or UNREADABLE in differences
        refused.append((is_foreign, len(differences), model_type, differences))
    *_, nearest, reasons = min(refused)
    raise NoFamilyError(f"no family describes this model; the nearest, {nearest}, differs: {'; '.join(reasons)}")


def _mismatches(model: Model, model_type: str, config: Config) -> list[str]:
    """The reasons why a family does not describe a model; [] if it does."""
    row = FAMILIES[model_type]
    differences = [
        f"{key} is {getattr(moe, key)}, but always {value} there"
        for moe in dict.fromkeys(experts_of(model))
        for key, value in row.fixed.items()
        if getattr(moe, key) != value
    ]
    if model.mtp is not None and not row.predicts:
        differences.append("multi-token prediction")
    read = huggingface.read(parse(Source("config.json", json.dumps(config))), model.name).model
    if read is None:
        return [*differences, UNREADABLE]
    differences += [
        f"{path.partition('.')[2] or path} is {ours}, but {theirs} there"
        for path, ours, theirs in _differences(_computing_settings(model), _computing_settings(read))
    ]
    if not differences:
        try:
            publish_tensors(model, row)
        except UnnamedError as error:
            differences.append(f"tensors that it lacks: {error}")
    return list(dict.fromkeys(differences))


def _computing_settings(model: Model) -> Mapping[str, Any]:
    """The settings that determine what a model computes, without those of training, by layer and key."""
    values = model.model_dump(mode="json", exclude={"name", "init_std", "attention", "layers", "mtp"})
    values["mtp"] = None if model.mtp is None else model.mtp.depth
    for layer in range(model.num_layers):
        ffn = model.ffn(layer).model_dump(mode="json", exclude={"balance", "max_nodes"}, exclude_none=True)
        attention = model.attention_of(layer).model_dump(mode="json", exclude={"indexer": {"loss"}}, exclude_none=True)
        values[f"layer {layer}"] = {"attention": attention, "ffn": ffn}
    return values


def _differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, our value, their value) for all differences."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif ours != theirs:
        yield path, ours, theirs


# ---------------------------------------------------------------- config.json
def model_config(model: Model, model_type: str, context: int) -> Config:
    """The config.json of a model as one of a type. Settings that the type cannot express are left out."""
    family = importable.FAMILIES[model_type]
    dense = next((span.ffn for span in model.layers if isinstance(span.ffn, Dense)), None)
    moe = next(iter(experts_of(model)), None)
    config: Config = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.num_layers,
        **_attention(model, family),
        **_linear(model, family),
        "attention_dropout": 0.0,
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        ("hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"): _activation(model),
        "tie_word_embeddings": model.tied,
        **_factors(model, family),
        "use_cache": True,
        **({"intermediate_size": dense.inner} if dense else {}),
        **({"mlp_bias": dense.bias} if dense and family.may_bias_ffn else {}),
        **FFN_KEYS[family.ffn](model, moe),
        **({"mlp_layer_types": _ffn_kinds(model)} if family.lists_ffn else {}),
    }
    theirs = {ours: name for name, ours in family.renamed.items()}
    return {theirs.get(key, key): value for key, value in config.items()}


def _ffn_kinds(model: Model) -> list[str]:
    """The value of `mlp_layer_types`: dense or sparse for each layer."""
    return ["dense" if isinstance(model.ffn(layer), Dense) else "sparse" for layer in range(model.num_layers)]


def _attention(model: Model, family: importable.ConfigFamily) -> Config:
    if isinstance(model.attention, Compressed):
        return attention_keys(model, _rope)
    attention = _softmax(model)
    return _mla(attention) if isinstance(attention, Mla) else _gqa(model, attention, family) if attention else {}


def _activation(model: Model) -> str:
    """The name of the first layer's feed-forward activation, which all layers of a family share."""
    names, first = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}, model.ffn(0)
    assert not isinstance(first, Custom), "compiler/tools/weights/checkpoint.py refuses it"
    return names.get(first.activation, "silu")


def _factors(model: Model, family: importable.ConfigFamily) -> Config:
    """Model-wide multipliers and the logit cap, for families that have them."""
    keys: Config = {"final_logit_softcapping": model.logit_cap} if family.caps_logits else {}
    if family.multiplies:
        keys |= {
            "embedding_multiplier": model.embedding_scale,
            "residual_multiplier": model.residual_scale,
            "logits_scaling": 1 / model.logit_scale,
        }
    return keys


def with_format(exported: Publication, format: Format) -> Config:
    """The config of a model stored in a format."""
    blocks = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [TILE, TILE],
        "modules_to_not_convert": sorted(_modules_of(exported.tensors)),
    }
    return exported.config | {"dtype": DTYPES[format]} | ({"quantization_config": blocks} if format == "fp8" else {})


def _modules_of(tensors: Iterable[PublishedTensor]) -> set[str]:
    """The modules whose matrices are not stored in FP8 blocks."""
    wide = (tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.kind != "linear" and tensor.shape[0])
    return {tensor.name.removesuffix(".weight") for tensor in wide if not tensor.name.endswith("embed_tokens.weight")}


def _softmax(model: Model) -> Mla | Gqa | None:
    """The softmax attention of a model, or of its first layer that has one."""
    attentions = (attention for attention in (model.attention, *map(model.attention_of, range(model.num_layers))))
    return next((attention for attention in attentions if isinstance(attention, Mla | Gqa)), None)


def _linear(model: Model, family: importable.ConfigFamily) -> Config:
    """The layers with linear attention, and its sizes, for families that have it."""
    layers = [*map(model.attention_of, range(model.num_layers))]
    net = next((layer for layer in layers if isinstance(layer, DeltaNet)), None)
    if not family.linear:
        return {}
    kinds: Config = {"layer_types": [LINEAR if isinstance(layer, DeltaNet) else FULL for layer in layers]}
    if net is None:
        return kinds
    if family.linear == "kimi":
        sizes = {"linear_num_heads": net.heads, "linear_head_dim": net.key_dim}
    else:
        sizes = {
            "linear_num_value_heads": net.heads,
            "linear_num_key_heads": net.key_heads,
            "linear_key_head_dim": net.key_dim,
            "linear_value_head_dim": net.value_dim,
        }
    return kinds | sizes | {"linear_conv_kernel_dim": net.convolution}


def _mla(attention: Mla) -> Config:
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.query_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.head_dim.nope,
        "qk_rope_head_dim": attention.head_dim.rope,
        "v_head_dim": attention.head_dim.value,
        "rope_interleave": True,
        "attention_bias": False,
        **_indexer(attention.indexer),
        **_rope(attention.rope),
    }


def _indexer(indexer: Indexer | None) -> Config:
    if indexer is None:
        return {}
    return {"index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.top_k}


def _gqa(model: Model, attention: Gqa, family: importable.ConfigFamily) -> Config:
    share = (attention.rope.width or attention.head_dim) / attention.head_dim if attention.rope else 1.0
    return {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        **({} if family.always_biased else {"attention_bias": attention.bias is not None}),
        **({family.may_norm: attention.qk_norm == "head"} if family.may_norm else {}),
        **({"partial_rotary_factor": share} if family.rotates_part else {}),
        **_scores(attention, family),
        **_windows(model, family),
        **_rotations(model, family, {"partial_rotary_factor": share} if family.rotates_part else {}),
    }


def _scores(attention: Gqa, family: importable.ConfigFamily) -> Config:
    """The scale of q·k and the logit cap, for families that have these keys."""
    keys: Config = {"attn_logit_softcapping": attention.softcap} if family.softcap else {}
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    if family.scale == "query_pre_attn_scalar":
        inverse = scale**-2
        keys["query_pre_attn_scalar"] = round(inverse) if math.isclose(inverse, round(inverse)) else inverse
    elif family.scale:
        keys[family.scale] = scale
    return keys


def _windows(model: Model, family: importable.ConfigFamily) -> Config:
    """The sliding window, for families that have one, of all layers or of those listed in `layer_types`."""
    windows = [layer.window for layer in map(model.attention_of, range(model.num_layers)) if isinstance(layer, Gqa)]
    length = next((window for window in windows if window is not None), None)
    if not family.windows:
        return {}
    keys: Config = {"sliding_window": length}
    if family.may_slide:
        keys["use_sliding_window"] = length is not None
    by_layer = family.slides_late or family.slides_early or family.slides_every or family.skips_rotation
    if family.local_theta or (length is not None and family.windows == "listed" and (by_layer or None in windows)):
        keys["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return keys


def _rotations(model: Model, family: importable.ConfigFamily, part: Mapping[str, float]) -> Config:
    """RoPE of all layers or by kind of layer, and the layers without it, for families that list them."""
    layers = [layer for layer in map(model.attention_of, range(model.num_layers)) if isinstance(layer, Gqa)]
    if family.skips_rotation:
        rope = next((layer.rope for layer in layers if layer.rope is not None), None)
        return {**_rope(rope, part), "no_rope_layers": [int(layer.rope is not None) for layer in layers]}
    if not family.local_theta:
        usual = _softmax(model)
        return _rope(usual.rope, part) if usual else {}
    kinds = {FULL: False, SLIDING: True}
    rope_by_kind = {
        kind: next((layer.rope for layer in layers if (layer.window is not None) == slides), None)
        for kind, slides in kinds.items()
    }
    return {"rope_parameters": {kind: _rope(rope)["rope_parameters"] for kind, rope in rope_by_kind.items() if rope}}


def _rope(rope: Rope | None, part: Mapping[str, float] = MappingProxyType({})) -> Config:
    """The RoPE keys, both those that most programs read and that of transformers 5; {} without RoPE. `part`: the key
    with the rotated share of a head."""
    if rope is None:
        return {}
    extension: Config = {"rope_type": "default"}
    if rope.scaling is not None:
        settings = rope.scaling.model_dump(mode="json", exclude={"kind", "original"}, exclude_none=True)
        extension = {"rope_type": rope.scaling.kind, **settings}
        if not isinstance(rope.scaling, LinearScaling):
            extension["original_max_position_embeddings"] = rope.scaling.original
    return {
        "rope_theta": rope.theta,
        **({"rope_scaling": extension} if rope.scaling is not None else {}),
        "rope_parameters": {**extension, "rope_theta": rope.theta, **part},
    }
