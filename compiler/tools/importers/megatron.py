"""Imports a Megatron-Bridge recipe or a Megatron-LM command line as a spec and a ledger of every key.

Keys have the names of Megatron-LM's arguments; `RENAMED` maps differing names in Megatron-Bridge. Defaults are those of
Megatron-LM (megatron/training/arguments.py, Megatron-Core 0.16).
"""

from __future__ import annotations

from typing import Any

from compiler.tools.exporters.megatron_bridge import RECOMPUTED
from compiler.tools.importers.json_text import JsonValue
from compiler.tools.importers.plan_ledger import (
    Degrees,
    ImportedPlan,
    Keys,
    Members,
    adam,
    rate_lines,
    spec_of,
    string,
    value_text,
)
from compiler.tools.importers.python_calls import DottedName, NotLiteralError, list_of
from compiler.tools.importers.write import number
from dsl.messages.diagnostics import Diagnostic

# --- The model as lines of a spec: latent attention or GQA, dense layers followed by MoE layers

MOST_LAYERS = 100_000  # the rules of a spec refuse more
# Keys whose value is fixed in dsc.
ALWAYS = {
    "normalization": "RMSNorm", "swiglu": True, "gated_linear_unit": True, "add_bias_linear": False,
    "disable_bias_linear": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_router_dtype": "fp32",
    "position_embedding_type": "rope",
}  # fmt: skip
# (keys, Megatron's default if none of them is present, why it cannot be expressed here)
DEFAULTS = (
    (("normalization",), "LayerNorm", "norms are RMSNorm here"),
    (("swiglu", "gated_linear_unit"), False, "feed-forward layers have SwiGLU here"),
    (("add_bias_linear", "disable_bias_linear"), "biases", "linear layers have no biases here"),
    (("hidden_dropout",), 0.1, "there is no dropout here"),
    (("attention_dropout",), 0.1, "there is no dropout here"),
    (("position_embedding_type", "use_rotary_position_embeddings"), "learned_absolute", "positions are rotated here"),
)
OF_EXPERTS = ((("moe_router_dtype",), "dtype of the weights", "routers compute in FP32 here"),)
OF_MLA = ((("qk_layernorm",), False, "latents have norms here"),)


def model_lines(keys: Keys, name: str, vocab: int | None) -> list[str]:
    """The block of the model."""
    layers = min(MOST_LAYERS, keys.size("num_layers", "model.layers"))
    hidden, heads = keys.size("hidden_size", "model.hidden"), keys.size("num_attention_heads", "model.attention.heads")
    if vocab is None:
        if keys.peek("vocab_size", None) is None:
            text = "the vocabulary size comes from the tokenizer, which is not read"
            keys.mistakes.append(Diagnostic("I0202", text, None, "set the padded size: --vocab N"))
        vocab = keys.take("vocab_size", "model.vocab", 1)
    else:
        keys.note("assumed", "vocab_size", vocab, "model.vocab, by --vocab")
        keys.lose("vocab_size", "--vocab overrides it", (vocab,))
    keys.lose("make_vocab_size_divisible_by", "padding of the vocabulary: `vocab` is the padded size", kind="no effect")
    eps = keys.take("norm_epsilon", "model.norm_eps", 1e-5)
    std = keys.take("init_method_std", "model.init_std", 0.02)
    keys.lose("output_layer_init_method", "all layers are initialized alike here", kind="no effect")
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
    """Record Megatron's defaults for absent keys that cannot be expressed here."""
    rows = (*DEFAULTS, *(OF_EXPERTS if keys.has("num_experts") else ()), *(OF_MLA if is_mla else ()))
    is_recipe = "MLA" in value_text(keys.peek("config.model", ""))  # its norms are RMSNorm
    for names, default, why in rows:
        if all(keys.peek(name, None) is None for name in names) and not (is_recipe and names[0] == "normalization"):
            keys.note("not expressible", names[0], default, f"Megatron's default; {why}")


def _mla(keys: Keys, heads: int, hidden: int) -> list[str]:
    rank = keys.take("q_lora_rank", "model.attention.query_rank", None, int)
    kv = keys.take("kv_lora_rank", "model.attention.kv_rank", 32)
    nope = keys.take("qk_head_dim", "model.attention.head_dim.nope", 128)
    rotated = keys.take("qk_pos_emb_head_dim", "model.attention.head_dim.rope", 64)
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
        path = "model.attention.rope.scaling"
        original = keys.take("original_max_position_embeddings", f"{path}.original", 4096)
        fast, slow = keys.take("beta_fast", f"{path}.beta_fast", 32.0), keys.take("beta_slow", f"{path}.beta_slow", 1.0)
        mscale, mscale_all = (
            keys.take("mscale", f"{path}.mscale", 1.0),
            keys.take("mscale_all_dim", f"{path}.mscale_all_dim", 0.0),
        )
        yarn = (
            f"factor = {number(factor)}, original = {original}, beta_fast = {number(fast)}, beta_slow = {number(slow)}"
        )
        yarn += (
            f", mscale = {number(mscale)}, mscale_all_dim = {number(mscale_all)}"
            if (mscale, mscale_all) != (1.0, 0.0)
            else ""
        )
        rope = f"rope {{ theta = {number(theta)}\nscaling yarn {{ {yarn} }} }}"
    for key in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        keys.lose(key, "the rotation is not scaled", kind="no effect")
    return [
        "attention mla {",
        f"heads = {heads}, query_rank = {'none' if rank is None else rank}, kv_rank = {kv}",
        f"head_dim {{ nope = {nope}, rope = {rotated}, value = {value} }}",
        rope,
        "}",
    ]


def _gqa(keys: Keys, heads: int, hidden: int) -> list[str]:
    is_recipe = "config.return" in keys.members  # in a recipe `num_query_groups` alone sets the KV heads
    grouped = keys.take("group_query_attention", "" if is_recipe else "model.attention.kv_heads", is_recipe)
    usual = heads if is_recipe or not grouped else 1
    groups = keys.take("num_query_groups", "model.attention.kv_heads" if grouped else "", usual, int)
    if not grouped and groups != heads:
        keys.note("no effect", "num_query_groups", groups, "without `group_query_attention` all heads have their own")
        groups = heads
    width = keys.take("kv_channels", "model.attention.head_dim", hidden // heads)
    norm = ", qk_norm = true" if keys.take("qk_layernorm", "model.attention.qk_norm", False) else ""
    theta = keys.take("rotary_base", "model.attention.rope.theta", 10000.0)
    keys.lose("rotary_percent", "this spec rotates whole heads; set `rope { width = … }`", (1.0, 1))
    bias = ", bias = qkv" if keys.take("add_qkv_bias", "model.attention.bias", False) else ""
    head = f"heads = {heads}, kv_heads = {groups}, head_dim = {width}{norm}{bias}"
    return ["attention gqa {", head, f"rope {{ theta = {number(theta)} }}", "}"]


def _layers(keys: Keys, layers: int, inner: int) -> list[str]:
    experts = keys.take("num_experts", "model.layers.1.ffn.experts", 0, int)
    if not experts:
        return [f"layers 0..{layers - 1} {{ ffn dense {{ inner = {inner} }} }}"]
    dense = _dense(keys, layers)
    lines = [f"layers 0..{dense - 1} {{ ffn dense {{ inner = {inner} }} }}"] if dense else []
    path = f"model.layers.{len(lines)}.ffn"
    width = keys.take("moe_ffn_hidden_size", f"{path}.inner", inner, int)
    shared = keys.take("moe_shared_expert_intermediate_size", f"{path}.shared", 0, int)
    count = shared // width if shared and shared % width == 0 else int(shared > 0)
    shared_inner = f", shared_inner = {shared}" if shared and shared != count * width else ""
    gate = ", shared_gate = true" if keys.take("moe_shared_expert_gate", f"{path}.shared_gate", False) else ""
    groups = keys.take("moe_router_num_groups", f"{path}.groups", 1, int)
    top_groups = keys.take("moe_router_group_topk", f"{path}.top_groups", 1, int)
    top_k = keys.take("moe_router_topk", f"{path}.top_k", 2)
    score = keys.take("moe_router_score_function", f"{path}.score", "softmax")
    if score not in ("sigmoid", "softmax"):
        keys.mistakes.append(Diagnostic("I0203", f"scores must be sigmoid or softmax, not {value_text(score)}", None))
        score = "softmax"
    pre_softmax = keys.take("moe_router_pre_softmax", f"{path}.normalize", False)
    normalize = score == "sigmoid" or not pre_softmax
    scale = keys.take("moe_router_topk_scaling_factor", f"{path}.scale", 1.0)
    if groups > 1 and top_k // top_groups != (1 if score == "softmax" else 2):
        why = "here, a group's score is its best expert with softmax, else the sum of its two best"
        keys.note("approximated", "moe_router_group_topk", top_groups, why)
    biased = keys.take("moe_router_enable_expert_bias", f"{path}.balance.bias_rate", False)
    rate = keys.take("moe_router_bias_update_rate", f"{path}.balance.bias_rate" if biased else "", 1e-3)
    kind = keys.take("moe_router_load_balancing_type", f"{path}.balance.sequence_loss", "aux_loss")
    loss = keys.take("moe_aux_loss_coeff", f"{path}.balance.sequence_loss", 0.0)
    if loss and kind not in ("seq_aux_loss", "none"):
        keys.note("approximated", "moe_router_load_balancing_type", kind, "replaced by a loss per sequence")
    balance = [f"bias_rate = {number(rate)}"] if biased else []
    balance += [f"sequence_loss = {number(loss)}"] if loss and kind != "none" else []
    keys.lose("moe_z_loss_coeff", "there is no z-loss", (0, 0.0))
    keys.lose("moe_router_force_load_balancing", "random routing is for benchmarks only", (False,))
    return [
        *lines,
        f"layers {dense}..{layers - 1} {{ ffn moe {{",
        f"experts = {experts}, shared = {count}, top_k = {top_k}, inner = {width}{shared_inner}{gate}",
        *([f"groups = {groups}, top_groups = {top_groups}"] if groups > 1 else []),
        f"score = {score}, normalize = {'true' if normalize else 'false'}, scale = {number(scale)}",
        *([f"balance {{ {', '.join(balance)} }}"] if balance else []),
        "} }",
    ]


def _dense(keys: Keys, layers: int) -> int:
    """The number of dense layers before the MoE layers."""
    written: Any = keys.take("moe_layer_freq", "model.layers", 1, (int, str, list))
    try:
        pattern = list_of(written) if isinstance(written, str) else written
    except NotLiteralError:
        pattern = None
    if type(pattern) is int and pattern > 0:
        pattern = [int(index % pattern == 0) for index in range(layers)]
    dense = pattern.index(1) if isinstance(pattern, list) and 1 in pattern else 0
    if pattern != [0] * dense + [1] * (layers - dense):
        text = f"`moe_layer_freq` = {value_text(written)} is not dense layers followed by MoE layers, {layers} in all"
        keys.mistakes.append(Diagnostic("I0301", text, None, "write `[0]*3+[1]*58`"))
    return dense


# --- The run

RENAMED = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "sequence_length": "seq_length",
    "random_seed": "seed",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
CONFIG = "ConfigContainer"  # the return type that marks a recipe
PARTS = {  # part of a recipe → its class
    "train": "TrainingConfig", "optimizer": "OptimizerConfig", "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig", "dataset": "GPTDatasetConfig", "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig", "checkpoint": "CheckpointConfig", "rng": "RNGConfig",
    "dist": "DistributedInitConfig", "comm_overlap": "CommOverlapConfig", "model": "MLAModelProvider", "return": CONFIG,
}  # fmt: skip
IDLE_PARTS = ("logger", "tokenizer", "checkpoint", "rng", "dist", "comm_overlap", "dataset")
USUAL = {"return": "_pretrain_common", "model": "GPTModelProvider"}  # other accepted classes or functions of a part
# Named precisions of Megatron-Bridge (megatron/bridge/training/mixed_precision.py), without the prefix bf16_ or fp16_.
PRECISIONS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "with_fp8_delayed_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "with_fp8_current_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "with_mxfp8_mixed": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
OF_MODULES = {theirs: ours for ours, theirs in RECOMPUTED.items()}
# Prefixes of keys that do not change the computation: logs, files, checks and speed.
IDLE = (
    *("log_", "tensorboard_", "wandb_", "timing_", "logging_", "distributed_", "manual_gc", "exit_", "dist_ckpt_"),
    *("num_workers", "data_cache_path", "mmap_", "no_mmap", "use_mcore", "use_flash_attn", "transformer_impl"),
    *("cross_entropy_", "no_check_for_nan", "check_for_nan", "create_attention_mask", "no_create_attention"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "transformer_layer_spec", "pipeline_dtype"),
    *("params_dtype", "autocast_", "nproc", "nnodes", "node_rank", "master_", "rdzv_", "save", "load", "no_load"),
    *("no_save", "auto_detect", "ckpt_", "async_save", "max_position_embeddings", "enable_experimental", "split"),
    *("no_rope_fusion", "apply_rope_fusion", "attention_backend", "overlap_param_gather", "profile", "gradient_acc"),
    "use_transformer_engine",
)


def keys_of_recipe(recipe: Members) -> Members:
    """The keys of a recipe by Megatron-LM's names: `model.num_moe_experts` becomes `num_experts`.

    A named precision becomes the keys that it stands for. `config.train` is the class of the part `train`.
    """
    members: dict[str, list[JsonValue]] = {}
    for path, values in recipe.items():
        name = path.rpartition(".")[2]
        name = f"config.{path}" if path in PARTS else RENAMED.get(name, name)
        members.setdefault(name, []).extend(values)
    for entry in recipe.get("mixed_precision", ()):
        for key, value in (_keys_of_precision(entry.value) or {}).items():
            if f"mixed_precision.{key}" not in recipe:
                members.setdefault(key, []).append(JsonValue(value, entry.span, entry.key))
    for entry in recipe.get("model", ()):
        members.setdefault(
            "multi_latent_attention", [JsonValue("MLA" in value_text(entry.value), entry.span, entry.key)]
        )
    return members


def _keys_of_precision(precision: Any) -> dict[str, Any] | None:
    """The keys that a named precision, given as a string or a call, stands for; None if the name is unknown."""
    name = precision.text.removesuffix("()") if isinstance(precision, DottedName) else precision
    base, _, variant = name.replace("-", "_").partition("_") if isinstance(name, str) else ("", "", "")
    if base not in ("bf16", "fp16") or variant not in PRECISIONS:
        return None
    return {base: True, "grad_reduce_in_fp32": base == "bf16"} | PRECISIONS[variant]


def import_keys(members: Members, name: str, devices: int | None, vocab: int | None) -> ImportedPlan:
    """Import the keys as a run `name`. `devices`, `vocab`: sizes that launcher and tokenizer would supply."""
    keys = Keys(members)
    model = model_lines(keys, name, vocab)
    parallel, world = _parallel(keys, devices)
    schedule = _schedule(keys)
    recompute, precision, train = _recompute(keys), _precision(keys), _train(keys)
    for key in list(members):
        if key.startswith(IDLE):
            keys.lose(key, "logs, files, checks or speed", kind="no effect")
        elif key.startswith(("if ", "for ")):
            keys.lose(key, "its body is assumed to run once", kind="assumed")
    for part, class_name in PARTS.items():
        harmless = tuple(DottedName(f"{accepted}()") for accepted in (class_name, USUAL.get(part, class_name)))
        why = f"expected a {class_name}: the defaults of other classes are unknown"
        keys.lose(f"config.{part}", why, harmless, "assumed" if part in IDLE_PARTS else "not expressible")
    keys.lose("tokenizer_type", "name the tokenizer in `data`", kind="assumed")
    keys.lose("tokenizer_model", "name the tokenizer in `data`", kind="assumed")
    keys.lose("data_path", "name the text in `data`", kind="assumed")
    keys.lose("mock_data", "name the text in `data`", kind="assumed")
    run = [*parallel, *schedule, *recompute, *train]
    return spec_of("Megatron", name, keys, world, run, model, precision)


def _parallel(keys: Keys, devices: int | None) -> tuple[list[str], int]:
    """The block `parallel`, and the number of devices."""
    pp = keys.take("pipeline_model_parallel_size", "parallel.pipeline", 1)
    tp = keys.take("tensor_model_parallel_size", "parallel.tensor", 1)
    cp = keys.take("context_parallel_size", "parallel.context", 1)
    ep = keys.take("expert_model_parallel_size", "parallel.expert", 1)
    etp = keys.take("expert_tensor_parallel_size", "parallel.expert_tensor", tp)
    zero = keys.take("use_distributed_optimizer", "parallel.zero", False)
    overlap = keys.take("overlap_grad_reduce", "parallel.overlap_reduce", False)
    keys.lose(
        "sequence_parallel",
        "tensor-parallel ranks always split tokens here",
        (True,) if tp > 1 else (True, False),
        "approximated",
    )
    keys.lose("moe_token_dispatcher_type", "the plan routes tokens itself", ("alltoall", "flex"), "approximated")
    keys.lose("moe_enable_deepep", "see `parallel.route`", kind="no effect")
    keys.lose("moe_flex_dispatcher_backend", "see `parallel.route`", kind="no effect")
    degrees = Degrees(pp, tp, cp, ep, etp)
    devices = degrees.devices(keys, devices)
    layout = keys.take("pipeline_model_parallel_layout", "parallel.layout", None, (str, list)) if pp > 1 else None
    if isinstance(layout, list):
        letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
        stages = [stage if isinstance(stage, list) else [] for stage in layout]
        layout = "|".join("".join(letters.get(str(item), "?") for item in stage) for stage in stages)
    keys.lose("pipeline_model_parallel_layout", "there is one stage")
    extra = (f", layout = {string(layout)}" if layout is not None else "") + ", overlap_reduce = false" * (not overlap)
    return [degrees.block(int(zero), extra)], devices


def _schedule(keys: Keys) -> list[str]:
    chunks = keys.take("num_virtual_stages_per_pipeline_rank", "schedule.chunks", 1)
    return [f"schedule {{ name = interleaved, chunks = {chunks} }}" if chunks > 1 else "schedule { name = 1f1b }"]


def _recompute(keys: Keys) -> list[str]:
    granularity = keys.take("recompute_granularity", "recompute", "")
    method = keys.take("recompute_method", "recompute_layers" if granularity == "full" else "", "")
    count = keys.take("recompute_num_layers", "recompute_layers" if granularity == "full" else "", 1)
    modules = keys.take("recompute_modules", "recompute" if granularity == "selective" else "", [], (str, list))
    if granularity == "full":
        if method == "uniform" and count > 1:
            keys.note("approximated", "recompute_num_layers", count, "layers are recomputed one by one here")
        return ["recompute = [layer]", *([f"recompute_layers = {count}"] if method == "block" else [])]
    if granularity != "selective":
        return []
    names = modules.split() if isinstance(modules, str) else modules or ["core_attn"]
    for module in (module for module in names if module not in OF_MODULES):
        keys.note("approximated", "recompute_modules", module, "a spec has no name for it: its activations are kept")
    ops = [OF_MODULES[module] for module in names if module in OF_MODULES]
    return [f"recompute = [{', '.join(ops)}]"] if ops else []


def _precision(keys: Keys) -> tuple[str, list[str]]:
    """A built-in precision, and the lines of a block that changes it."""
    named = keys.take("mixed_precision", "precision", None, object) if keys.has("mixed_precision") else None
    if named not in (None, DottedName("MixedPrecisionConfig()")) and _keys_of_precision(named) is None:
        keys.note("not expressible", "mixed_precision", named, "not known in Megatron-Bridge: imported as BF16 or FP32")
    bf16 = keys.take("bf16", "precision.compute", False)
    keys.lose("fp32", "`bf16` is set too", (not bf16,))
    keys.lose("fp16", "there is no FP16 here: imported as BF16 or FP32", (False,))
    fp32_gradients = keys.take("grad_reduce_in_fp32", "precision.gradients", True)
    fp32_gradients = keys.take("accumulate_allreduce_grads_in_fp32", "", fp32_gradients)
    fp8 = keys.take("fp8", "precision.linear", keys.take("fp8_format", "precision.linear", ""))
    recipe = keys.take("fp8_recipe", "precision.linear" if fp8 else "", "delayed")
    keys.lose("use_precision_aware_optimizer", "see the dtypes of moments", kind="no effect")
    keys.lose("main_params_dtype", "master weights are FP32 here", (DottedName("torch.float32"), "fp32"))
    keys.lose(
        "main_grads_dtype",
        "gradients are summed in another dtype",
        (DottedName("torch.float32"), "fp32"),
        "approximated",
    )
    moments = [keys.take(key, "precision.moments", "fp32", object) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    lines = [] if fp32_gradients or not bf16 else ["gradients = bf16"]
    if all(getattr(dtype, "text", dtype) in ("torch.bfloat16", "bf16") for dtype in moments):
        lines.append("moments = bf16")
    if fp8 and (fp8, recipe) in (("e4m3", "blockwise"),):
        lines += ["linear = e4m3, activation_tile = 1x128, weight_tile = 128x128"]
    elif fp8:
        keys.note("not expressible", "fp8", f"{fp8}, {recipe}", "a spec's FP8 is blockwise or MX: imported as BF16")
    return "bf16" if bf16 else "fp32", lines if bf16 else []


def _train(keys: Keys) -> list[str]:
    sequence = keys.take("seq_length", "train.sequence", 0)
    micro_batch, batch = (
        keys.take("micro_batch_size", "train.micro_batch", 1),
        keys.take("global_batch_size", "train.batch", 0),
    )
    if not sequence or not batch:
        missing = "seq_length" if not sequence else "global_batch_size"
        keys.mistakes.append(Diagnostic("I0202", f"`{missing}` is missing", None, f"add it, such as {missing} 4096"))
    keys.lose("rampup_batch_size", "write `batch { … }` in `train`")

    def steps_of(prefix: str, path: str, default: int | None) -> int | None:
        samples = keys.take(f"{prefix}_samples", path, 0) if keys.has(f"{prefix}_samples") else 0
        if keys.has(f"{prefix}_iters") or not samples:
            return keys.take(f"{prefix}_iters", path, default, int)
        if batch and samples % batch:
            keys.note("approximated", f"{prefix}_samples", samples, "rounded to whole steps")
        return round(samples / max(1, batch))

    steps = steps_of("train", "train.tokens", None)
    if steps is None:
        keys.mistakes.append(Diagnostic("I0202", "`train_iters` is missing", None, "add it, such as train_iters 10000"))
        steps = 1
    warmup = steps_of("lr_warmup", "train.rate", 0) or 0
    decay = steps_of("lr_decay", "train.rate", None) or steps
    peak, least = keys.take("lr", "train.rate", 0.0), keys.take("min_lr", "train.rate", 0.0)
    style = keys.take("lr_decay_style", "train.rate", "linear")
    keys.lose("lr_warmup_init", "warm-up starts at 0 here", (0, 0.0), "approximated")
    decay_steps = keys.take("lr_wsd_decay_iters", "train.rate", 0, int) if style == "WSD" else decay - warmup
    shape = keys.take("lr_wsd_decay_style", "train.rate", "exponential") if style == "WSD" else style
    if shape not in ("constant", "linear", "cosine"):
        keys.note("approximated", "lr_decay_style", shape, "replaced by cosine")
        shape = "cosine"
    decay_start = min(steps, max(warmup, decay - decay_steps))
    if shape != "constant" and decay > steps:
        keys.note("approximated", "lr_decay_iters", decay, "the decay ends with the run here")
    weight_decay = keys.take("weight_decay", "train.optimizer.weight_decay", 0.01)
    for key in ("start_weight_decay", "end_weight_decay"):
        keys.lose(key, "weight decay is constant here", (weight_decay, float(weight_decay)))
    clip = keys.take("clip_grad", "train.optimizer.clip", 1.0)
    keys.lose("optimizer", "replaced by AdamW", ("adam",), "approximated")
    defaults = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    settings = {key: keys.take(f"adam_{key}", f"train.optimizer.{key}", value) for key, value in defaults.items()}
    settings |= {"weight_decay": weight_decay}
    lines = [
        "train {",
        f"sequence = {sequence}, micro_batch = {micro_batch}, batch = {batch}, steps = {steps}",
        f"seed = {keys.take('seed', 'train.seed', 1234, least=0)}",
        adam(settings, clip),
        *rate_lines(warmup, shape, peak, least, (decay_start, min(decay, steps), steps)),
    ]
    save_interval = keys.take("save_interval", "train.checkpoint.every" if keys.has("save_interval") else "", 0, int)
    keep = keys.take("most_recent_k", "train.checkpoint.keep" if keys.has("most_recent_k") else "", -1, int, -1)
    if save_interval:
        lines.append(f"checkpoint {{ every = {save_interval} steps{f', keep = {keep}' if keep > 0 else ''} }}")
    eval_interval = keys.take("eval_interval", "train.validate.every" if keys.has("eval_interval") else "", 0, int)
    batches = keys.take("eval_iters", "train.validate.batches" if keys.has("eval_iters") else "", 100, int, 0)
    if eval_interval and batches:
        lines.append(f"validate {{ every = {eval_interval} steps, batches = {batches} }}")
    return [*lines, "}"]
