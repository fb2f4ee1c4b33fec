"""Imports DeepSeek-V4 configs (arXiv 2606.19348): attention by layer, and layers whose experts a hash table chooses.

The rules follow `DeepseekV4Config` of `transformers` 5.23, which also reads the keys of the published files:
`compress_ratios` for `layer_types`, `num_hash_layers` for `mlp_layer_types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from compiler.tools.importers.ends import activation
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.reader import ConfigReader, Remark, value_text
from compiler.tools.importers.rotation import scaling_of
from dsl.schema import (
    Balance,
    Compressed,
    Csa,
    Hca,
    HyperConnections,
    Indexer,
    LayerRange,
    Moe,
    Phase,
    Rope,
    YarnScaling,
)
from dsl.schema.model import MAX_LAYER, Clamp

WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
OF_RATIO = {0: WINDOW, 4: CSA, 128: HCA}  # entry of `compress_ratios` → kind of layer
RATES = {CSA: ("compress_rate_csa", 4), HCA: ("compress_rate_hca", 128)}
TABLE, SCORES = "hash_moe", "moe"
SCORE = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
BIAS_RATE = 0.001  # from the DeepSeek-V4 report


# ---------------------------------------------------------------- experts


def layers(reader: ConfigReader) -> tuple[LayerRange, ...]:
    """All layers as ranges: experts are chosen by a table in the first layers, and by scores in the others."""
    num_layers = reader.count("num_hidden_layers", 1, MAX_LAYER + 1)
    kinds = _read_layer_list(reader, "mlp_layer_types", num_layers, (TABLE, SCORES), "ffn")
    by_table = reader.count("num_hash_layers", 0, MAX_LAYER + 1, 3)
    kinds = kinds or [TABLE] * min(num_layers, by_table) + [SCORES] * max(0, num_layers - by_table)
    by_scores = _moe(reader)
    changes = {"choice": "table", "balance": Balance()}
    parts = {SCORES: by_scores, TABLE: by_scores.model_copy(update=changes)}
    spans, first = [], 0
    for kind, run in groupby(kinds):
        last = first + len(list(run)) - 1
        spans.append(LayerRange(first=first, last=last, ffn=parts[kind]))
        first = last + 1
    return tuple(spans)


def _moe(reader: ConfigReader) -> Moe:
    path = "model.layers.0.ffn"
    word, method = reader.text("scoring_func", "sqrtsoftplus"), reader.text("topk_method", "noaux_tc")
    if word not in SCORE:
        reader.refuse("ffn", "scoring_func", f"the scores of such a model are one of {', '.join(SCORE)}")
        word = "sqrtsoftplus"
    if method != "noaux_tc":
        reader.refuse("ffn", "topk_method", "such a model chooses experts by scores plus a bias, as noaux_tc does")
    if (normalized := reader.get("norm_topk_prob")) is not None and normalized.value is not True:
        text = "norm_topk_prob = false is left out: deepseek_v4 always divides the chosen scores by their sum"
        reader.warn("I0303", "ffn", text, reader.place("norm_topk_prob"))
    loss = reader.number("", Balance, "sequence_loss", "router_aux_loss_coef", default=0.0, null=0.0)
    if loss:
        text = (
            f"router_aux_loss_coef = {value_text(loss)} weighs a loss over the batch and all layers, on another scale"
        )
        reader.warn(
            "I0303", "balance", f"{text}; this spec has a loss per sequence", reader.place("router_aux_loss_coef")
        )
    reader.remarks.append(Remark("balance", f"bias_rate is not in the config: {BIAS_RATE} is DeepSeek-V4's"))
    return Moe(
        experts=reader.number(f"{path}.experts", Moe, "experts", "n_routed_experts", "num_local_experts"),
        shared=reader.number(f"{path}.shared", Moe, "shared", "n_shared_experts"),
        top_k=reader.number(f"{path}.top_k", Moe, "top_k", "num_experts_per_tok"),
        inner=reader.number(f"{path}.inner", Moe, "inner", "moe_intermediate_size", "intermediate_size"),
        activation=activation(reader),
        clamp=Clamp(limit=reader.number(f"{path}.clamp.limit", Clamp, "limit", "swiglu_limit")),
        score=SCORE[word],  # type: ignore[arg-type]
        normalize=True,
        scale=reader.number(f"{path}.scale", Moe, "scale", "routed_scaling_factor"),
        balance=Balance(bias_rate=(Phase(value=BIAS_RATE),), sequence_loss=loss),
    )


# ---------------------------------------------------------------- attention


def attentions(reader: ConfigReader, num_layers: int) -> tuple[tuple[Compressed, ...], int | None, Compressed]:
    """The attention of each layer, the context length before its extension (None without one), and the attention of
    the multi-token prediction block, which has only a window."""
    path = "model.attention"
    reader.used |= {"num_key_value_heads", "attention_bias"}  # always one KV head, without biases
    window_rope, compressed_rope, original = _rotations(reader)
    window = Compressed(
        heads=reader.number(f"{path}.heads", Compressed, "heads", "num_attention_heads"),
        head_dim=reader.number(f"{path}.head_dim", Compressed, "head_dim", "head_dim"),
        query_rank=reader.number(f"{path}.query_rank", Compressed, "query_rank", "q_lora_rank"),
        window=reader.number(f"{path}.window", Compressed, "window", "sliding_window"),
        sinks=True,
        groups=reader.number(f"{path}.groups", Compressed, "groups", "o_groups"),
        out_rank=reader.number(f"{path}.out_rank", Compressed, "out_rank", "o_lora_rank"),
        rope=window_rope,
    )
    rates = _rates(reader)
    indexer = Indexer(
        heads=reader.number(f"{path}.compress.indexer.heads", Indexer, "heads", "index_n_heads"),
        head_dim=reader.number(f"{path}.compress.indexer.head_dim", Indexer, "head_dim", "index_head_dim"),
        top_k=reader.number(f"{path}.compress.indexer.top_k", Indexer, "top_k", "index_topk"),
    )
    compress = {CSA: Csa(rate=rates[CSA], indexer=indexer), HCA: Hca(rate=rates[HCA])}
    of_kind = {
        WINDOW: window,
        **{
            kind: window.model_copy(update={"compress": compression, "rope": compressed_rope})
            for kind, compression in compress.items()
        },
    }
    return tuple(of_kind[kind] for kind in _kinds(reader, num_layers)), original, window


def _kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    """The kind of each layer: a window only, or also entries compressed by CSA or HCA."""
    listed = _read_layer_list(reader, "layer_types", num_layers, (WINDOW, CSA, HCA), "attention")
    ratios = reader.get("compress_ratios")
    if listed is not None or ratios is None:
        usual = [CSA if layer % 2 else HCA for layer in range(max(0, num_layers - 2))]
        return listed or [HCA] * min(num_layers, 2) + usual
    values = [entry.value for entry in ratios.value] if isinstance(ratios.value, tuple) else []
    matches = [OF_RATIO.get(value) if type(value) is int else None for value in values[:num_layers]]
    kinds = [kind for kind in matches if kind is not None]
    if len(kinds) < num_layers:
        text = f"`compress_ratios` must have 0, 4 or 128 for each of {num_layers} layers, unlike {value_text(ratios)}"
        reader.complain("I0203", text, ratios.span)
        return [WINDOW] * num_layers
    return kinds


def _read_layer_list(
    reader: ConfigReader, name: str, num_layers: int, words: tuple[str, ...], place: Any
) -> list[str] | None:
    """The entries of a list key with one of `words` for each layer; None if the key is absent."""
    listed = reader.get(name)
    if listed is None:
        return None
    values = [entry.value for entry in listed.value] if isinstance(listed.value, tuple) else [listed.value]
    unsupported = next((value for value in values if value not in words), None)
    if unsupported is not None:
        reader.refuse(place, name, f"layers of {value_text(unsupported)}; such a model has {', '.join(words)}")
    elif len(values) != num_layers:
        reader.complain("I0203", f"`{name}` has {len(values)} entries for {num_layers} layers", listed.span)
    else:
        return [str(value) for value in values]
    return [words[0]] * num_layers


def _rates(reader: ConfigReader) -> dict[str, int]:
    """Tokens per compressed entry, by kind of layer."""
    block = reader.part("compress_rates")
    inner = ConfigReader(JsonValue(block, reader.members["compress_rates"].span), lossy=reader.lossy) if block else None
    rates = {}
    for kind, (name, usual) in RATES.items():
        rates[kind] = reader.number("", Hca, "rate", name, default=usual)
        if inner is not None:
            rates[kind] = inner.number("", Hca, "rate", kind, default=rates[kind])
    if inner is not None:
        reader.mistakes += inner.mistakes
        for key in sorted({*block} - {*RATES}):
            reader.warn("I0302", "attention", f"`{value_text(key)[1:-1]}` of compress_rates is unknown", block[key].key)
    return rates


def _rotations(reader: ConfigReader) -> tuple[Rope, Rope, int | None]:
    """RoPE of window-only layers, RoPE of the others, and the context length before its extension. YaRN does not scale
    the sines (`attention_factor` 1), whatever its factor."""
    parameters, flat = reader.part("rope_parameters"), reader.part("rope_scaling")
    nested = {name: _part(parameters, name) for name in ("main", "compress")}
    width = _width(reader, nested["main"] or parameters)
    bases = {"main": "rope_theta", "compress": "compress_rope_theta"}
    ropes: dict[str, Rope] = {}
    original: int | None = None
    for name, key in bases.items():
        theta = reader.number("model.attention.rope.theta", Rope, "theta", key)
        named = nested[name]
        if named:
            inner = ConfigReader(JsonValue(named, reader.members["rope_parameters"].span), lossy=reader.lossy)
            theta = inner.number("", Rope, "theta", "rope_theta", default=theta)
            reader.mistakes += inner.mistakes
        part = named or ({} if name == "main" else {**parameters, **flat})
        scaling, before = (
            scaling_of(reader, "rope_parameters" if named or not flat else "rope_scaling", part)
            if part
            else (None, None)
        )
        if isinstance(scaling, YarnScaling) and scaling.attention_factor is None:
            scaling = scaling.model_copy(update={"attention_factor": 1.0})
        original = original if before is None else before
        ropes[name] = Rope(theta=theta, width=width, scaling=scaling)
    return ropes["main"], ropes["compress"], original


def _part(parameters: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    part = parameters[name].value if name in parameters else None
    return part if isinstance(part, Mapping) else {}


def _width(reader: ConfigReader, parameters: Mapping[str, JsonValue]) -> int:
    """Rotated columns of a head: `qk_rope_head_dim`, or else `partial_rotary_factor` of the head."""
    head = reader.get("head_dim")
    columns = head.value if head is not None and type(head.value) is int else 8
    factor = parameters.get("partial_rotary_factor") or reader.get("partial_rotary_factor")
    reader.used.add("partial_rotary_factor")
    share = factor.value if factor is not None else 1 / 8
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        text = f"`partial_rotary_factor` must be above 0 and at most 1, not {value_text(share)}"
        reader.complain("I0203", text, factor.span if factor else None)
        share = 1
    return int(
        reader.number(
            "model.attention.rope.width", Rope, "width", "qk_rope_head_dim", default=max(2, int(columns * share))
        )
    )


def hyper_connections(reader: ConfigReader) -> HyperConnections:
    """The hyper-connections (several residual streams) of a model."""
    path = "model.hyper_connections"
    return HyperConnections(
        streams=reader.number(f"{path}.streams", HyperConnections, "streams", "hc_mult"),
        rounds=reader.number(f"{path}.rounds", HyperConnections, "rounds", "hc_sinkhorn_iters"),
        eps=reader.number(f"{path}.eps", HyperConnections, "eps", "hc_eps"),
    )
