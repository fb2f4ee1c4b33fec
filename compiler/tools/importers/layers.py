"""Feed-forward parts of a Hugging Face config: which layers have experts, how a gate chooses, what balances them."""

from __future__ import annotations

from itertools import groupby

from compiler.tools.importers import deepseek_v4
from compiler.tools.importers.ends import activation, qkv_biases
from compiler.tools.importers.families import Family
from compiler.tools.importers.reader import Reader, Remark, shown
from dsl.schema import Balance, Dense, LayerRange, Moe, Phase
from dsl.schema.model import MAX_LAYER, Act, Clamp

OF_EXPERTS = {
    *("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok"),
    *("n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"),
    *("moe_intermediate_size", "aux_loss_alpha", "router_aux_loss_coef", "seq_aux"),
}
BIAS_RATE = 0.001  # DeepSeek-V3's; a config says that there is a bias, not how fast it moves


def layers(reader: Reader, family: Family, model_type: str) -> tuple[LayerRange, ...]:
    """All layers, as the ranges that a spec has."""
    if family.ffn == "deepseek_v4":
        return deepseek_v4.layers(reader)
    num_layers = reader.count("num_hidden_layers", 1, MAX_LAYER + 1)
    kinds = _kinds(reader, family, num_layers)
    order = [kind for kind, _ in groupby(kinds)]
    act = activation(reader) if family.acts else "swiglu"
    if family.linear and act != "swiglu":
        text = "the activation of linear attention, too, which is SiLU in a spec"
        reader.refuse("attention", "hidden_act", text)
    dense = _dense(reader, family, order.index(False), act) if False in order else None
    moe = _moe(reader, family, model_type, order.index(True)) if True in order else None
    moe = moe.model_copy(update={"activation": act}) if moe is not None else None
    if family.ffn != "dense":  # keys of a part that no layer has
        reader.used |= OF_EXPERTS if moe is None else {"intermediate_size"}
    spans, first = [], 0
    for kind, run in groupby(kinds):
        length = len(list(run))
        ffn = moe if kind else dense
        assert ffn is not None
        spans.append(LayerRange(first=first, last=first + length - 1, ffn=ffn))
        first += length
    return tuple(spans)


def _kinds(reader: Reader, family: Family, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    if family.ffn == "deepseek":
        return _deepseek_layers(reader, family, num_layers)
    return _qwen_layers(reader, num_layers) if family.ffn == "qwen" else [family.ffn != "dense"] * num_layers


def _deepseek_layers(reader: Reader, family: Family, num_layers: int) -> list[bool]:
    every = reader.count("moe_layer_freq", 1, MAX_LAYER + 1, 1)
    if "n_routed_experts" in reader.members and reader.members["n_routed_experts"].value is None:
        reader.used |= {"n_routed_experts", "first_k_dense_replace"}
        return [False] * num_layers
    if family.lists_ffn and (listed := reader.get("mlp_layer_types")) is not None:
        kinds = [each.value for each in listed.value] if isinstance(listed.value, tuple) else []
        if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
            text = f"`mlp_layer_types` has dense or sparse for each of {num_layers} layers, {shown(listed)} has not"
            reader.complain("I0203", text, listed.span)
        reader.used.add("first_k_dense_replace")
        return [kind == "sparse" for kind in kinds] if len(kinds) == num_layers else [True] * num_layers
    dense = reader.count("first_k_dense_replace", 0, MAX_LAYER + 1)
    return [layer >= dense and layer % every == 0 for layer in range(num_layers)]


def _qwen_layers(reader: Reader, num_layers: int) -> list[bool]:
    step = reader.count("decoder_sparse_step", 1, MAX_LAYER + 1, 1)
    listed = reader.get("mlp_only_layers")
    dense = [each.value for each in listed.value] if listed is not None and isinstance(listed.value, tuple) else []
    if listed is not None and (not isinstance(listed.value, tuple) or not all(type(each) is int for each in dense)):
        reader.complain("I0203", f"`mlp_only_layers` is a list of layers, {shown(listed)} is not", listed.span)
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]


def _dense(reader: Reader, family: Family, index: int, act: Act) -> Dense:
    inner = reader.number(f"model.layers.{index}.ffn.inner", Dense, "inner", "intermediate_size")
    return Dense(inner=inner, activation=act, bias=family.may_bias_ffn and reader.flag("mlp_bias", False))


def _moe(reader: Reader, family: Family, model_type: str, index: int) -> Moe:
    at = f"model.layers.{index}.ffn"
    aliases = ("num_local_experts", "num_experts")  # what `transformers` also reads them from
    names = ("n_routed_experts", *aliases) if family.ffn == "deepseek" else aliases
    inner = "intermediate_size" if family.ffn in ("mixtral", "olmoe", "gpt_oss") else "moe_intermediate_size"
    top_k = ("num_experts_per_tok", *(("experts_per_token",) if family.ffn == "gpt_oss" else ()))
    moe = Moe(
        experts=reader.number(f"{at}.experts", Moe, "experts", *names),
        shared=0,
        top_k=reader.number(f"{at}.top_k", Moe, "top_k", *top_k),
        inner=reader.number(f"{at}.inner", Moe, "inner", inner),
        score="softmax",
        normalize=True if family.ffn in ("mixtral", "gpt_oss") else reader.flag("norm_topk_prob", False),
        balance=Balance(),
    )
    if family.ffn == "deepseek":
        return _deepseek_gate(reader, family, model_type, moe, at)
    balance = Balance(
        sequence_loss=_batch_loss(reader, "router_aux_loss_coef", "batch and all layers, on another scale")
    )
    _is_balanced(reader, balance)
    more: dict[str, object] = {}
    if family.ffn == "gpt_oss":
        limit = reader.number(f"{at}.clamp.limit", Clamp, "limit", "swiglu_limit")
        alpha = reader.number(f"{at}.clamp.alpha", Clamp, "alpha", "swiglu_alpha")
        more = {"clamp": Clamp(limit=limit, alpha=alpha, shift=1.0), "bias": True, "router_bias": True}
    if family.shared_gate:
        qkv_biases(reader)
        width = reader.number(f"{at}.shared_inner", Moe, "shared_inner", "shared_expert_intermediate_size")
        more = {"shared": 1, "shared_inner": width, "shared_gate": True}
    return moe.model_copy(update={"balance": balance, **more})


def _deepseek_gate(reader: Reader, family: Family, model_type: str, moe: Moe, at: str) -> Moe:
    score, method = "sigmoid", "noaux_tc"
    if not family.gate:
        score, method = reader.text("scoring_func", "softmax"), reader.text("topk_method", "greedy")
    groups, top_groups = (
        reader.number(f"{at}.{field}", Moe, field, name, null=1) if method != "greedy" or name in reader.members else 1
        for field, name in (("groups", "n_group"), ("top_groups", "topk_group"))
    )
    scale = reader.number(f"{at}.scale", Moe, "scale", "routed_scaling_factor", default=1.0)
    if score not in ("sigmoid", "softmax"):
        reader.refuse("ffn", "scoring_func", "the scores of a spec are sigmoid or softmax")
        score = reader.defaults["scoring_func"]
    if method == "greedy" and groups > 1:
        text = f"n_group = {groups} is not in this spec: topk_method greedy chooses among all experts"
        reader.warn("I0303", "ffn", text, reader.members["n_group"].key)
    if method == "greedy":
        groups = top_groups = 1
    elif method not in ("noaux_tc", "group_limited_greedy") or (method == "noaux_tc") != (score == "sigmoid"):
        how = "noaux_tc with sigmoid scores, group_limited_greedy with softmax, and greedy with either"
        reader.refuse("ffn", "topk_method", f"with {score} scores; a spec has {how}")
    if moe.normalize and score == "softmax" and scale != 1:
        text = f"routed_scaling_factor = {shown(scale)} is not in this spec: {model_type} does not scale where it "
        reader.warn("I0303", "ffn", f"{text}normalizes (norm_topk_prob)", reader.place("routed_scaling_factor"))
        scale = 1.0
    weigh = _loss if reader.flag("seq_aux", True) else _batch_loss
    balance = Balance(sequence_loss=weigh(reader, "aux_loss_alpha"))
    if method == "noaux_tc" and score == "sigmoid":
        if "aux_loss_alpha" in reader.filled:
            text = f"aux_loss_alpha is not in the config: {balance.sequence_loss:g} is the default of {model_type}"
            reader.remarks.append(Remark("balance", f"{text}, DeepSeek-V3's report has 1e-4"))
        reader.remarks.append(Remark("balance", f"bias_rate is not in the config: {BIAS_RATE} is DeepSeek-V3's"))
        balance = balance.model_copy(update={"bias_rate": (Phase(value=BIAS_RATE),)})
    _is_balanced(reader, balance)
    return moe.model_copy(
        update={
            "shared": reader.number(f"{at}.shared", Moe, "shared", "n_shared_experts", default=0, null=0),
            "groups": groups,
            "top_groups": top_groups,
            "score": score,
            "scale": scale,
            "balance": balance,
        }
    )


def _loss(reader: Reader, name: str) -> float:
    weight: float = reader.number("", Balance, "sequence_loss", name, default=0.0, null=0.0)
    if name in reader.members and reader.members[name].value is None:
        text = f"{name} = null: no loss keeps the load within a sequence even"
        reader.warn("I0303", "balance", text, reader.place(name))
    return weight


def _batch_loss(reader: Reader, name: str, over: str = "batch") -> float:
    """A balancing loss over the whole batch. A spec has one for each sequence: the nearest, and said to be another."""
    weight = _loss(reader, name)
    if weight:
        text = f"{name} = {shown(weight)} weighs a loss over the {over}; in this spec, one for each sequence"
        reader.warn("I0303", "balance", text, reader.place(name))
    return weight


def _is_balanced(reader: Reader, balance: Balance) -> None:
    if balance == Balance() and not reader.failed:
        text = "the config has nothing that keeps the load of the experts even; see bias_rate and sequence_loss"
        reader.warn("I0303", "balance", text)
