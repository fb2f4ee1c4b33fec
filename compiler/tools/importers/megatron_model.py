"""The model of a configuration of Megatron, as the lines of a spec: latent attention or grouped queries, dense layers
and behind them layers with experts."""

from __future__ import annotations

from typing import Any

from compiler.tools.importers.literal_python import NotLiteralError, list_of
from compiler.tools.importers.plan_ledger import Keys, shown
from compiler.tools.importers.write import number
from dsl.messages.diagnostics import Diagnostic

MOST_LAYERS = 100_000  # more are refused by the rules of a spec

# What models have here in any case.
ALWAYS = {
    "normalization": "RMSNorm", "swiglu": True, "gated_linear_unit": True, "add_bias_linear": False,
    "disable_bias_linear": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_dtype": "fp32",
    "position_embedding_type": "rope",
}  # fmt: skip
# What Megatron has where none of some keys is written, and no model has here.
DEFAULTS = (
    (("normalization",), "LayerNorm", "norms are RMSNorm here"),
    (("swiglu", "gated_linear_unit"), False, "feed-forward layers have SwiGLU here"),
    (("add_bias_linear", "disable_bias_linear"), "biases", "linear layers have no biases here"),
    (("hidden_dropout",), 0.1, "there is no dropout here"),
    (("attention_dropout",), 0.1, "there is no dropout here"),
    (("position_embedding_type", "use_rotary_position_embeddings"), "learned_absolute", "positions are rotated here"),
)
OF_EXPERTS = ((("moe_router_dtype",), "that of the weights", "routers compute in FP32 here"),)
OF_MLA = ((("qk_layernorm",), False, "latents have norms here"),)


def model_lines(keys: Keys, name: str, vocab: int | None) -> list[str]:
    """The block of the model."""
    layers = min(MOST_LAYERS, keys.size("num_layers", "model.layers"))
    hidden, heads = keys.size("hidden_size", "model.hidden"), keys.size("num_attention_heads", "model.attention.heads")
    if vocab is None:
        if keys.peek("vocab_size", None) is None:
            text = "the vocabulary is that of the tokenizer, which is not read"
            keys.mistakes.append(Diagnostic("I0202", text, None, "say it: --vocab N, padded"))
        vocab = keys.take("vocab_size", "model.vocab", 1)
    else:
        keys.note("assumed", "vocab_size", vocab, "model.vocab, by --vocab")
        keys.lose("vocab_size", "--vocab says another", (vocab,))
    keys.lose("make_vocab_size_divisible_by", "padding of the vocabulary: `vocab` is the padded size", kind="no effect")
    eps = keys.take("norm_epsilon", "model.norm_eps", 1e-5)
    std = keys.take("init_method_std", "model.init_std", 0.02)
    keys.lose("output_layer_init_method", "all layers begin alike here", kind="no effect")
    keys.lose("activation_func", "experts and dense layers have SwiGLU here", kind="no effect")
    is_mla = keys.peek("multi_latent_attention", False) is True
    _defaults(keys, is_mla)
    for key, value in ALWAYS.items():
        keys.lose(key, f"models have {key} = {value} here", (value, int(value) if value == 0.0 else value))
    untied = keys.take("untie_embeddings_and_output_weights", "model.tied", False)
    tied = keys.take("share_embeddings_and_output_weights", "model.tied", not untied)
    keys.lose("use_rotary_position_embeddings", "positions are rotated here", (True,))
    attention = _mla if keys.take("multi_latent_attention", "model.attention.kind", False) else _gqa
    lines = [f"model {name}_model {{", f"vocab = {vocab}, hidden = {hidden}, init_std = {number(std)}"]
    lines += [f"norm_eps = {number(eps)}", *(["tied = true"] if tied else [])]
    lines += attention(keys, heads, hidden)
    lines += _layers(keys, layers, keys.size("ffn_hidden_size", "model.layers.0.ffn.inner"))
    if depth := keys.take("mtp_num_layers", "model.mtp.depth", 0, int):
        weight = keys.take("mtp_loss_scaling_factor", "model.mtp.weight", 0.1)
        lines.append(f"mtp {{ depth = {depth}, weight = {number(weight)} }}")
    keys.lose("mtp_loss_scaling_factor", "there is no multi-token prediction", kind="no effect")
    return [*lines, "}"]


def _defaults(keys: Keys, is_mla: bool) -> None:
    """Take note of what Megatron has where keys are not written, and no model has here."""
    rows = (*DEFAULTS, *(OF_EXPERTS if keys.has("num_experts") else ()), *(OF_MLA if is_mla else ()))
    of_recipe = "MLA" in shown(keys.peek("config.model", ""))  # whose norms are RMSNorm
    for names, default, why in rows:
        if all(keys.peek(name, None) is None for name in names) and not (of_recipe and names[0] == "normalization"):
            keys.note("not expressible", names[0], default, f"the default of Megatron; {why}")


def _mla(keys: Keys, heads: int, hidden: int) -> list[str]:
    rank = keys.take("q_lora_rank", "model.attention.query_rank", None, int)
    kv = keys.take("kv_lora_rank", "model.attention.kv_rank", 32)
    nope = keys.take("qk_head_dim", "model.attention.head_dim.nope", 128)
    turned = keys.take("qk_pos_emb_head_dim", "model.attention.head_dim.rope", 64)
    value = keys.take("v_head_dim", "model.attention.head_dim.value", 128)
    keys.lose("kv_channels", "latent attention has head_dim", kind="no effect")
    keys.lose("num_query_groups", "latent attention has no groups", (heads,))
    keys.lose("group_query_attention", "latent attention has no groups", (False,))
    keys.lose("qk_layernorm", "latents have norms here", (True,))
    kind = keys.take("rope_type", "model.attention.rope.scaling", "yarn")
    theta = keys.take("rotary_base", "model.attention.rope.theta", 10000.0)
    factor = keys.take("rotary_scaling_factor", "model.attention.rope.scaling.factor", 1.0)
    rope = f"rope {{ theta = {number(theta)} }}"
    if kind == "yarn" and factor != 1:
        of = "model.attention.rope.scaling"
        original = keys.take("original_max_position_embeddings", f"{of}.original", 4096)
        fast, slow = keys.take("beta_fast", f"{of}.beta_fast", 32.0), keys.take("beta_slow", f"{of}.beta_slow", 1.0)
        mscale, every = (
            keys.take("mscale", f"{of}.mscale", 1.0),
            keys.take("mscale_all_dim", f"{of}.mscale_all_dim", 0.0),
        )
        yarn = (
            f"factor = {number(factor)}, original = {original}, beta_fast = {number(fast)}, beta_slow = {number(slow)}"
        )
        yarn += (
            f", mscale = {number(mscale)}, mscale_all_dim = {number(every)}" if (mscale, every) != (1.0, 0.0) else ""
        )
        rope = f"rope {{ theta = {number(theta)}\nscaling yarn {{ {yarn} }} }}"
    for key in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        keys.lose(key, "the rotation is not scaled", kind="no effect")
    return [
        "attention mla {",
        f"heads = {heads}, query_rank = {'none' if rank is None else rank}, kv_rank = {kv}",
        f"head_dim {{ nope = {nope}, rope = {turned}, value = {value} }}",
        rope,
        "}",
    ]


def _gqa(keys: Keys, heads: int, hidden: int) -> list[str]:
    is_recipe = "config.return" in keys.members  # where `num_query_groups` alone says it
    grouped = keys.take("group_query_attention", "" if is_recipe else "model.attention.kv_heads", is_recipe)
    usual = heads if is_recipe or not grouped else 1
    groups = keys.take("num_query_groups", "model.attention.kv_heads" if grouped else "", usual, int)
    if not grouped and groups != heads:
        keys.note("no effect", "num_query_groups", groups, "without `group_query_attention` all heads have their own")
        groups = heads
    width = keys.take("kv_channels", "model.attention.head_dim", hidden // heads)
    norm = ", qk_norm = true" if keys.take("qk_layernorm", "model.attention.qk_norm", False) else ""
    theta = keys.take("rotary_base", "model.attention.rope.theta", 10000.0)
    keys.lose("rotary_percent", "all of a head is rotated in this spec: `rope { width = … }`", (1.0, 1))
    bias = ", bias = qkv" if keys.take("add_qkv_bias", "model.attention.bias", False) else ""
    head = f"heads = {heads}, kv_heads = {groups}, head_dim = {width}{norm}{bias}"
    return ["attention gqa {", head, f"rope {{ theta = {number(theta)} }}", "}"]


def _layers(keys: Keys, layers: int, inner: int) -> list[str]:
    experts = keys.take("num_experts", "model.layers.1.ffn.experts", 0, int)
    if not experts:
        return [f"layers 0..{layers - 1} {{ ffn dense {{ inner = {inner} }} }}"]
    dense = _dense(keys, layers)
    found = [f"layers 0..{dense - 1} {{ ffn dense {{ inner = {inner} }} }}"] if dense else []
    of = f"model.layers.{len(found)}.ffn"
    width = keys.take("moe_ffn_hidden_size", f"{of}.inner", inner, int)
    shared = keys.take("moe_shared_expert_intermediate_size", f"{of}.shared", 0, int)
    count = shared // width if shared and shared % width == 0 else int(shared > 0)
    own = f", shared_inner = {shared}" if shared and shared != count * width else ""
    gate = ", shared_gate = true" if keys.take("moe_shared_expert_gate", f"{of}.shared_gate", False) else ""
    groups = keys.take("moe_router_num_groups", f"{of}.groups", 1, int)
    top = keys.take("moe_router_group_topk", f"{of}.top_groups", 1, int)
    chosen = keys.take("moe_router_topk", f"{of}.top_k", 2)
    score = keys.take("moe_router_score_function", f"{of}.score", "softmax")
    if score not in ("sigmoid", "softmax"):
        keys.mistakes.append(Diagnostic("I0203", f"scores are sigmoid or softmax, {shown(score)} is neither", None))
        score = "softmax"
    before = keys.take("moe_router_pre_softmax", f"{of}.normalize", False)
    normal = score == "sigmoid" or not before
    scale = keys.take("moe_router_topk_scaling_factor", f"{of}.scale", 1.0)
    if groups > 1 and chosen // top != (1 if score == "softmax" else 2):
        why = "a group is scored by its best expert with softmax, else by its two best"
        keys.note("approximated", "moe_router_group_topk", top, why)
    biased = keys.take("moe_router_enable_expert_bias", f"{of}.balance.bias_rate", False)
    rate = keys.take("moe_router_bias_update_rate", f"{of}.balance.bias_rate" if biased else "", 1e-3)
    kind = keys.take("moe_router_load_balancing_type", f"{of}.balance.sequence_loss", "aux_loss")
    loss = keys.take("moe_aux_loss_coeff", f"{of}.balance.sequence_loss", 0.0)
    if loss and kind not in ("seq_aux_loss", "none"):
        keys.note("approximated", "moe_router_load_balancing_type", kind, "the loss of each sequence stands for it")
    balance = [f"bias_rate = {number(rate)}"] if biased else []
    balance += [f"sequence_loss = {number(loss)}"] if loss and kind != "none" else []
    keys.lose("moe_z_loss_coeff", "there is no z-loss", (0, 0.0))
    keys.lose("moe_router_force_load_balancing", "routing by chance is for benchmarks alone", (False,))
    return [
        *found,
        f"layers {dense}..{layers - 1} {{ ffn moe {{",
        f"experts = {experts}, shared = {count}, top_k = {chosen}, inner = {width}{own}{gate}",
        *([f"groups = {groups}, top_groups = {top}"] if groups > 1 else []),
        f"score = {score}, normalize = {'true' if normal else 'false'}, scale = {number(scale)}",
        *([f"balance {{ {', '.join(balance)} }}"] if balance else []),
        "} }",
    ]


def _dense(keys: Keys, layers: int) -> int:
    """How many layers in front are dense."""
    written: Any = keys.take("moe_layer_freq", "model.layers", 1, (int, str, list))
    try:
        pattern = list_of(written) if isinstance(written, str) else written
    except NotLiteralError:
        pattern = None
    if type(pattern) is int and pattern > 0:
        pattern = [int(index % pattern == 0) for index in range(layers)]
    dense = pattern.index(1) if isinstance(pattern, list) and 1 in pattern else 0
    if pattern != [0] * dense + [1] * (layers - dense):
        text = f"`moe_layer_freq` = {shown(written)} is not dense layers and behind them {layers} in all"
        keys.mistakes.append(Diagnostic("I0301", text, None, "write `[0]*3+[1]*58`"))
    return dense
