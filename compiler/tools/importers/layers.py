"""Feed-forward layers of a Hugging Face config: which have experts, how the router chooses, how load is balanced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from compiler.tools.importers import deepseek_v4
from compiler.tools.importers.ends import activation, qkv_biases
from compiler.tools.importers.families import ConfigFamily
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.reader import ConfigReader, Remark, value_text
from compiler.tools.importers.rotation import FULL
from dsl.schema import Balance, Compressed, DeltaNet, Dense, Gqa, LayerRange, Mla, Moe, Phase
from dsl.schema.model import MAX_LAYER, Act, Clamp

# --- Attention that differs by layer: the model's attention, and ranges of layers that override it

Attention = Mla | Gqa | Compressed | DeltaNet


def assign_attention(
    spans: Sequence[LayerRange], by_layer: Sequence[Attention]
) -> tuple[Attention, tuple[LayerRange, ...]]:
    """The most frequent attention, and the layer ranges, in the order of a spec, with the attention of the others.

    `spans`: contiguous ranges without attention; `by_layer`: the attention of each layer.
    """
    count = Counter(map(repr, by_layer))
    usual = max(by_layer, key=lambda attention: count[repr(attention)])
    ranges = [part for span in spans for part in _divide_by_attention(span, by_layer, usual)]
    return usual, tuple(sorted(ranges, key=lambda span: (span.first, span.last, span.by)))


def _divide_by_attention(span: LayerRange, by_layer: Sequence[Attention], usual: Attention) -> Iterator[LayerRange]:
    """Divide a range by attention: the range plus one over every N-th layer, or else one range per run of layers."""
    differing = [layer for layer in span.layers if by_layer[layer] != usual]
    step = differing[1] - differing[0] if len(differing) > 1 else 0
    alike = all(by_layer[layer] == by_layer[differing[0]] for layer in differing)
    if not differing:
        yield span
    elif step > 1 and alike and differing == [*range(differing[0], differing[-1] + 1, step)]:
        yield span
        changes = {"first": differing[0], "last": differing[-1], "by": step, "attention": by_layer[differing[0]]}
        yield span.model_copy(update=changes)
    else:
        for _, group in groupby(span.layers, key=lambda layer: repr(by_layer[layer])):
            run = [*group]
            attention = None if by_layer[run[0]] == usual else by_layer[run[0]]
            yield span.model_copy(update={"first": run[0], "last": run[-1], "attention": attention})


# --- Linear attention in a Hugging Face config: which layers have it, and its sizes

LINEAR = "linear_attention"  # a kind of layer
AT = "model.attention"


def linear_layers(reader: ConfigReader, family: ConfigFamily, num_layers: int) -> tuple[set[int], DeltaNet | None]:
    """The indices of layers with linear attention, and that attention."""
    if not family.linear:
        return set(), None
    nested = reader.part("linear_attn_config") if family.linear == "kimi" else {}
    linear = _linear_layers_of_types(reader, num_layers)
    if nested and linear is None:
        linear = _linear_layers_of_kimi(reader, nested, num_layers)
    if linear is None and family.linear == "qwen":
        interval = reader.count("full_attention_interval", 1, 2**20, 4)
        linear = {layer for layer in range(num_layers) if (layer + 1) % interval}
    elif linear is None:
        linear = {layer for layer in range(num_layers) if not layer or layer % 4}
    reader.used |= {"full_attention_interval"}
    return linear, _kimi(reader, nested) if family.linear == "kimi" else _qwen(reader)


def _linear_layers_of_types(reader: ConfigReader, num_layers: int) -> set[int] | None:
    """The linear-attention layers that `layer_types` lists; None if it is absent."""
    listed = reader.get("layer_types")
    if listed is None:
        return None
    values = [entry.value for entry in listed.value] if isinstance(listed.value, tuple) else []
    if len(values) != num_layers or any(kind not in (FULL, LINEAR) for kind in values):
        text = (
            f"`layer_types` must have {FULL} or {LINEAR} for each of {num_layers} layers, unlike {value_text(listed)}"
        )
        reader.complain("I0203", text, listed.span)
    return {layer for layer, kind in enumerate(values[:num_layers]) if kind == LINEAR}


def _linear_layers_of_kimi(reader: ConfigReader, nested: Mapping[str, JsonValue], num_layers: int) -> set[int] | None:
    """The linear-attention layers from Kimi's `kda_layers`, which counts from 1; None if it is absent."""
    listed = nested.get("kda_layers")
    if listed is None or not isinstance(listed.value, tuple):
        return None
    indices = {entry.value - 1 for entry in listed.value if type(entry.value) is int}
    if len(indices) != len(listed.value) or not indices <= {*range(num_layers)}:
        text = f"`kda_layers` must have numbers of layers, 1 to {num_layers}, unlike {value_text(listed)}"
        reader.complain("I0203", text, listed.span)
    return indices & {*range(num_layers)}


def _qwen(reader: ConfigReader) -> DeltaNet:
    names = {
        "heads": "linear_num_value_heads",
        "key_heads": "linear_num_key_heads",
        "key_dim": "linear_key_head_dim",
        "value_dim": "linear_value_head_dim",
        "convolution": "linear_conv_kernel_dim",
    }
    sizes = {key: reader.number(f"{AT}.{key}", DeltaNet, key, name) for key, name in names.items()}
    return DeltaNet(gate="head", **sizes)


def _kimi(reader: ConfigReader, nested: Mapping[str, JsonValue]) -> DeltaNet:
    """The sizes of Kimi Delta Attention: in a nested object as published, at the top level in `transformers`."""
    names = {"heads": "num_heads", "key_dim": "head_dim", "convolution": "short_conv_kernel_size"}
    flat = {"heads": "linear_num_heads", "key_dim": "linear_head_dim", "convolution": "linear_conv_kernel_dim"}
    inner = (
        ConfigReader(JsonValue(nested, reader.members["linear_attn_config"].span), lossy=reader.lossy)
        if nested
        else reader
    )
    sizes = {key: inner.number(f"{AT}.{key}", DeltaNet, key, name) for key, name in (names if nested else flat).items()}
    if nested:
        reader.used |= {*flat.values()}
        reader.mistakes += inner.mistakes
        reader.origins |= {path: span for path, span in inner.origins.items() if path}
    return DeltaNet(gate="channel", key_heads=sizes["heads"], value_dim=sizes["key_dim"], **sizes)


# --- layers

OF_EXPERTS = {
    *("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"),
    *("moe_intermediate_size", "aux_loss_alpha", "router_aux_loss_coef", "seq_aux"),
}
BIAS_RATE = 0.001  # DeepSeek-V3's; a config says that there is a bias, but not its update rate


def layers(reader: ConfigReader, family: ConfigFamily, model_type: str) -> tuple[LayerRange, ...]:
    """All layers as ranges of a spec."""
    if family.ffn == "deepseek_v4":
        return deepseek_v4.layers(reader)
    num_layers = reader.count("num_hidden_layers", 1, MAX_LAYER + 1)
    kinds = _kinds(reader, family, num_layers)
    order = [kind for kind, _ in groupby(kinds)]
    act = activation(reader) if family.acts else "swiglu"
    if family.linear and act != "swiglu":
        text = "it is also the activation of linear attention, which is SiLU in a spec"
        reader.refuse("attention", "hidden_act", text)
    dense = _dense(reader, family, order.index(False), act) if False in order else None
    moe = _moe(reader, family, model_type, order.index(True)) if True in order else None
    moe = moe.model_copy(update={"activation": act}) if moe is not None else None
    if family.ffn != "dense":  # mark the keys of a layer kind that no layer has
        reader.used |= OF_EXPERTS if moe is None else {"intermediate_size"}
    spans, first = [], 0
    for kind, run in groupby(kinds):
        length = len(list(run))
        ffn = moe if kind else dense
        assert ffn is not None
        spans.append(LayerRange(first=first, last=first + length - 1, ffn=ffn))
        first += length
    return tuple(spans)


def _kinds(reader: ConfigReader, family: ConfigFamily, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    if family.ffn == "deepseek":
        return _deepseek_layers(reader, family, num_layers)
    return _qwen_layers(reader, num_layers) if family.ffn == "qwen" else [family.ffn != "dense"] * num_layers


def _deepseek_layers(reader: ConfigReader, family: ConfigFamily, num_layers: int) -> list[bool]:
    interval = reader.count("moe_layer_freq", 1, MAX_LAYER + 1, 1)
    if "n_routed_experts" in reader.members and reader.members["n_routed_experts"].value is None:
        reader.used |= {"n_routed_experts", "first_k_dense_replace"}
        return [False] * num_layers
    if family.lists_ffn and (listed := reader.get("mlp_layer_types")) is not None:
        kinds = [entry.value for entry in listed.value] if isinstance(listed.value, tuple) else []
        if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
            text = (
                f"`mlp_layer_types` must have dense or sparse for all {num_layers} layers, unlike {value_text(listed)}"
            )
            reader.complain("I0203", text, listed.span)
        reader.used.add("first_k_dense_replace")
        return [kind == "sparse" for kind in kinds] if len(kinds) == num_layers else [True] * num_layers
    dense = reader.count("first_k_dense_replace", 0, MAX_LAYER + 1)
    return [layer >= dense and layer % interval == 0 for layer in range(num_layers)]


def _qwen_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    step = reader.count("decoder_sparse_step", 1, MAX_LAYER + 1, 1)
    listed = reader.get("mlp_only_layers")
    dense = [entry.value for entry in listed.value] if listed is not None and isinstance(listed.value, tuple) else []
    if listed is not None and (not isinstance(listed.value, tuple) or not all(type(layer) is int for layer in dense)):
        reader.complain("I0203", f"`mlp_only_layers` must be a list of layers, not {value_text(listed)}", listed.span)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _dense(reader: ConfigReader, family: ConfigFamily, index: int, act: Act) -> Dense:
    inner = reader.number(f"model.layers.{index}.ffn.inner", Dense, "inner", "intermediate_size")
    return Dense(inner=inner, activation=act, bias=family.may_bias_ffn and reader.flag("mlp_bias", False))


def _moe(reader: ConfigReader, family: ConfigFamily, model_type: str, index: int) -> Moe:
    path = f"model.layers.{index}.ffn"
    aliases = ("num_local_experts", "num_experts")  # `transformers` reads these too
    names = ("n_routed_experts", *aliases) if family.ffn == "deepseek" else aliases
    inner = "intermediate_size" if family.ffn in ("mixtral", "olmoe", "gpt_oss") else "moe_intermediate_size"
    top_k = ("num_experts_per_tok", *(("experts_per_token",) if family.ffn == "gpt_oss" else ()))
    moe = Moe(
        experts=reader.number(f"{path}.experts", Moe, "experts", *names),
        shared=0,
        top_k=reader.number(f"{path}.top_k", Moe, "top_k", *top_k),
        inner=reader.number(f"{path}.inner", Moe, "inner", inner),
        score="softmax",
        normalize=True if family.ffn in ("mixtral", "gpt_oss") else reader.flag("norm_topk_prob", False),
        balance=Balance(),
    )
    if family.ffn == "deepseek":
        return _deepseek_gate(reader, family, model_type, moe, path)
    balance = Balance(
        sequence_loss=_batch_loss(reader, "router_aux_loss_coef", "batch and all layers, on another scale")
    )
    _is_balanced(reader, balance)
    changes: dict[str, object] = {}
    if family.ffn == "gpt_oss":
        limit = reader.number(f"{path}.clamp.limit", Clamp, "limit", "swiglu_limit")
        alpha = reader.number(f"{path}.clamp.alpha", Clamp, "alpha", "swiglu_alpha")
        changes = {"clamp": Clamp(limit=limit, alpha=alpha, shift=1.0), "bias": True, "router_bias": True}
    if family.shared_gate:
        qkv_biases(reader)
        width = reader.number(f"{path}.shared_inner", Moe, "shared_inner", "shared_expert_intermediate_size")
        changes = {"shared": 1, "shared_inner": width, "shared_gate": True}
    return moe.model_copy(update={"balance": balance, **changes})


def _deepseek_gate(reader: ConfigReader, family: ConfigFamily, model_type: str, moe: Moe, path: str) -> Moe:
    score, method = "sigmoid", "noaux_tc"
    if not family.gate:
        score, method = reader.text("scoring_func", "softmax"), reader.text("topk_method", "greedy")
    groups, top_groups = (
        reader.number(f"{path}.{field}", Moe, field, name, null=1)
        if method != "greedy" or name in reader.members
        else 1
        for field, name in (("groups", "n_group"), ("top_groups", "topk_group"))
    )
    scale = reader.number(f"{path}.scale", Moe, "scale", "routed_scaling_factor", default=1.0)
    if score not in ("sigmoid", "softmax"):
        reader.refuse("ffn", "scoring_func", "the scores of a spec are sigmoid or softmax")
        score = reader.defaults["scoring_func"]
    if method == "greedy" and groups > 1:
        text = f"n_group = {groups} is left out: topk_method greedy chooses among all experts"
        reader.warn("I0303", "ffn", text, reader.members["n_group"].key)
    if method == "greedy":
        groups = top_groups = 1
    elif method not in ("noaux_tc", "group_limited_greedy") or (method == "noaux_tc") != (score == "sigmoid"):
        methods = "noaux_tc with sigmoid scores, group_limited_greedy with softmax, and greedy with either"
        reader.refuse("ffn", "topk_method", f"with {score} scores; a spec supports {methods}")
    if moe.normalize and score == "softmax" and scale != 1:
        text = f"routed_scaling_factor = {value_text(scale)} is left out: {model_type} does not scale weights that it "
        reader.warn("I0303", "ffn", f"{text}normalizes (norm_topk_prob)", reader.place("routed_scaling_factor"))
        scale = 1.0
    weigh = _loss if reader.flag("seq_aux", True) else _batch_loss
    balance = Balance(sequence_loss=weigh(reader, "aux_loss_alpha"))
    if method == "noaux_tc" and score == "sigmoid":
        if "aux_loss_alpha" in reader.filled:
            text = f"aux_loss_alpha is not in the config: {balance.sequence_loss:g} is the default of {model_type}"
            reader.remarks.append(Remark("balance", f"{text}; DeepSeek-V3's report has 1e-4"))
        reader.remarks.append(Remark("balance", f"bias_rate is not in the config: {BIAS_RATE} is DeepSeek-V3's"))
        balance = balance.model_copy(update={"bias_rate": (Phase(value=BIAS_RATE),)})
    _is_balanced(reader, balance)
    return moe.model_copy(
        update={
            "shared": reader.number(f"{path}.shared", Moe, "shared", "n_shared_experts", default=0, null=0),
            "groups": groups,
            "top_groups": top_groups,
            "score": score,
            "scale": scale,
            "balance": balance,
        }
    )


def _loss(reader: ConfigReader, name: str) -> float:
    weight: float = reader.number("", Balance, "sequence_loss", name, default=0.0, null=0.0)
    if name in reader.members and reader.members[name].value is None:
        text = f"{name} = null: no loss balances the experts' load within a sequence"
        reader.warn("I0303", "balance", text, reader.place(name))
    return weight


def _batch_loss(reader: ConfigReader, name: str, extent: str = "batch") -> float:
    """The weight of a balancing loss over the whole batch. A spec only has one per sequence, which approximates it and
    is reported."""
    weight = _loss(reader, name)
    if weight:
        text = f"{name} = {value_text(weight)} weighs a loss over the {extent}; this spec has a loss per sequence"
        reader.warn("I0303", "balance", text, reader.place(name))
    return weight


def _is_balanced(reader: ConfigReader, balance: Balance) -> None:
    if balance == Balance() and not reader.has_failed:
        text = "nothing in the config balances the experts' load; see bias_rate and sequence_loss"
        reader.warn("I0303", "balance", text)
