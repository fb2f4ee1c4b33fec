"""Names that other training systems use for the keys and words of the language, for hints and `dsc explain`.

Specs cannot use these names: each thing has one name. Look-ups ignore case.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsl.facts.schedules import FACTS
from dsl.messages.diagnostics import join_as_code

# --- Keys of other systems whose values are the same here, in lower case

# Key of another system → paths of the keys here that take the same value, without kinds of blocks.
KEYS: dict[str, tuple[str, ...]] = {
    # adapters
    **dict.fromkeys(("r", "lora_r", "lora_rank"), ("adapter.rank",)),
    "lora_alpha": ("adapter.alpha",),
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules"), ("adapter.on",)),
    # degrees of parallelism
    "pp": ("parallel.pipeline",),
    "pp_size": ("parallel.pipeline",),
    "pp_degree": ("parallel.pipeline",),
    "pipeline_parallel": ("parallel.pipeline",),
    "pipeline_parallel_size": ("parallel.pipeline",),
    "pipeline_parallel_degree": ("parallel.pipeline",),
    "pipeline_model_parallel_size": ("parallel.pipeline",),
    "dp": ("parallel.data",),
    "dp_size": ("parallel.data",),
    "dp_degree": ("parallel.data",),
    "data_parallel": ("parallel.data",),
    "data_parallel_size": ("parallel.data",),
    "tp": ("parallel.tensor",),
    "tp_size": ("parallel.tensor",),
    "tp_degree": ("parallel.tensor",),
    "tensor_parallel": ("parallel.tensor",),
    "tensor_parallel_size": ("parallel.tensor",),
    "tensor_parallel_degree": ("parallel.tensor",),
    "tensor_model_parallel_size": ("parallel.tensor",),
    **dict.fromkeys(("ep", "ep_size", "ep_degree"), ("parallel.expert",)),
    **dict.fromkeys(("expert_parallel", "expert_parallel_size", "expert_parallel_degree"), ("parallel.expert",)),
    "expert_model_parallel_size": ("parallel.expert",),
    **dict.fromkeys(("etp", "etp_size", "expert_tensor_parallel_size"), ("parallel.expert_tensor",)),
    "expert_tensor_parallel_degree": ("parallel.expert_tensor",),
    "cp": ("parallel.context",),
    "cp_size": ("parallel.context",),
    "context_parallel": ("parallel.context",),
    "context_parallel_size": ("parallel.context",),
    "context_parallel_degree": ("parallel.context",),
    "zero_stage": ("parallel.zero",),
    "zero_level": ("parallel.zero",),
    "virtual_pipeline": ("schedule.chunks",),
    "num_model_chunks": ("schedule.chunks",),
    "vpp": ("schedule.chunks",),
    "vpp_size": ("schedule.chunks",),
    "virtual_pipeline_model_parallel_size": ("schedule.chunks",),
    # the run
    "global_batch": ("train.batch",),
    "global_batch_size": ("train.batch",),
    "batch_size": ("train.batch",),
    "train_batch_size": ("train.batch",),
    "gbs": ("train.batch",),
    "micro_batch_size": ("train.micro_batch",),
    "microbatch": ("train.micro_batch",),
    "microbatch_size": ("train.micro_batch",),
    "per_device_train_batch_size": ("train.micro_batch",),
    "train_micro_batch_size_per_gpu": ("train.micro_batch",),
    "local_batch_size": ("train.micro_batch",),
    "mbs": ("train.micro_batch",),
    "seq": ("train.sequence",),
    "seq_len": ("train.sequence",),
    "seqlen": ("train.sequence",),
    "seq_length": ("train.sequence",),
    "sequence_length": ("train.sequence",),
    "max_seq_len": ("train.sequence",),
    "max_seq_length": ("train.sequence",),
    "max_length": ("train.sequence",),
    "cutoff_len": ("train.sequence",),
    "context_length": ("train.sequence",),
    "max_position_embeddings": ("train.sequence",),
    "block_size": ("train.sequence",),
    "iters": ("train.steps",),
    "max_iters": ("train.steps",),
    "train_iters": ("train.steps",),
    "iterations": ("train.steps",),
    "max_steps": ("train.steps",),
    "num_steps": ("train.steps",),
    "train_steps": ("train.steps",),
    "total_steps": ("train.steps",),
    "max_tokens": ("train.tokens",),
    "num_tokens": ("train.tokens",),
    "train_tokens": ("train.tokens",),
    "total_tokens": ("train.tokens",),
    "random_seed": ("train.seed",),
    "wd": ("train.optimizer.weight_decay",),
    "adam_beta1": ("train.optimizer.beta1",),
    "adam_beta2": ("train.optimizer.beta2",),
    "adam_eps": ("train.optimizer.eps",),
    **dict.fromkeys(("ns_steps", "muon_num_ns_steps"), ("train.optimizer.newton_schulz",)),
    "epsilon": ("train.optimizer.eps", "model.norm_eps", "train.grpo.clip_low"),
    "qk_clip_threshold": ("train.optimizer.qk_clip",),
    "clip_grad": ("train.optimizer.clip",),
    "grad_clip": ("train.optimizer.clip",),
    "max_grad_norm": ("train.optimizer.clip",),
    "max_norm": ("train.optimizer.clip",),
    "gradient_clipping": ("train.optimizer.clip",),
    "save_interval": ("train.checkpoint.every",),
    "save_steps": ("train.checkpoint.every",),
    "save_every": ("train.checkpoint.every",),
    "interval": ("train.checkpoint.every", "train.validate.every"),
    "save_total_limit": ("train.checkpoint.keep",),
    "async": ("train.checkpoint.background",),
    "async_save": ("train.checkpoint.background",),
    "eval_interval": ("train.validate.every",),
    "eval_steps": ("train.validate.every",),
    "eval_iters": ("train.validate.batches",),
    "path": ("data.source",),
    "data_path": ("data.source",),
    "dataset": ("data.source",),
    "files": ("data.source",),
    **dict.fromkeys(("text_column", "text_field", "text_key", "dataset_text_field", "content_key"), ("data.column",)),
    "tokenizer_path": ("data.tokenizer",),
    "tokenizer_model": ("data.tokenizer",),
    **dict.fromkeys(("input_key", "prompt_key"), ("data.prompts.prompt",)),
    **dict.fromkeys(("label_key", "answer_key"), ("data.prompts.answer",)),
    "val_split": ("data.validation",),
    "validation_split": ("data.validation",),
    "chat_template": ("data.chat.template",),
    "chat_template_path": ("data.chat.template",),
    **dict.fromkeys(("packing", "sample_packing", "neat_packing"), ("data.chat.pack",)),
    "dtype": ("precision",),
    "recompute_modules": ("recompute",),
    "activation_checkpointing": ("recompute",),
    "gradient_checkpointing": ("recompute",),
    "recompute_num_layers": ("recompute_layers",),
    "cpu_offload": ("offload",),
    "offload_optimizer": ("offload",),
    "optimizer_cpu_offload": ("offload",),
    "ema_decay": ("train.ema.decay",),
    "rolling_interval_length": ("train.health.window",),
    "check_weight_hash_across_dp_replicas_interval": ("train.health.hash",),
    # learning from rewards
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "group_size"), ("train.grpo.group",)),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "rollout_max_prompt_len"), ("train.grpo.prompt",)),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "generate_max_len", "rollout_max_response_len"),
        ("train.grpo.completion",),
    ),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), ("train.grpo.kl",)),
    **dict.fromkeys(("epsilon_low", "eps_clip", "clip_ratio", "clip_ratio_low"), ("train.grpo.clip_low",)),
    "use_bias_correction_kl": ("train.grpo.kl_form",),
    **dict.fromkeys(("epsilon_high", "eps_clip_high", "clip_ratio_high"), ("train.grpo.clip_high",)),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), ("train.grpo.iterations",)),
    "rollout_temperature": ("train.grpo.temperature",),
    "loss_type": ("train.grpo.loss",),
    "scale_rewards": ("train.grpo.scale",),
    "num_sms": ("sm.communication", "cluster.node.device.sms"),
    # the cluster
    "num_nodes": ("cluster.nodes",),
    "nnodes": ("cluster.nodes",),
    "n_nodes": ("cluster.nodes",),
    "gpus": ("cluster.node.devices",),
    "num_gpus": ("cluster.node.devices",),
    "n_gpus": ("cluster.node.devices",),
    "gpus_per_node": ("cluster.node.devices",),
    "num_devices": ("cluster.node.devices",),
    "devices_per_node": ("cluster.node.devices",),
    "nproc_per_node": ("cluster.node.devices",),
    "network": ("cluster.node.nic",),
    "net": ("cluster.node.nic",),
    "infiniband": ("cluster.node.nic",),
    "ib": ("cluster.node.nic",),
    "gpu": ("cluster.node.device",),
    "flops": ("cluster.node.device.bf16",),
    "tflops": ("cluster.node.device.bf16",),
    "peak_flops": ("cluster.node.device.bf16",),
    "bf16_flops": ("cluster.node.device.bf16",),
    "fp8_flops": ("cluster.node.device.fp8",),
    "mem": ("cluster.node.device.memory",),
    "vram": ("cluster.node.device.memory",),
    "bandwidth": ("cluster.node.device.hbm",),
    "memory_bandwidth": ("cluster.node.device.hbm",),
    "hbm_bandwidth": ("cluster.node.device.hbm",),
    "num_cores": ("cluster.node.device.cores",),
    "cpus": ("cluster.node.device.cores",),
    # the model
    "vocab_size": ("model.vocab",),
    "n_vocab": ("model.vocab",),
    "hidden_size": ("model.hidden",),
    "hidden_dim": ("model.hidden",),
    "d_model": ("model.hidden",),
    "n_embd": ("model.hidden",),
    "dim": ("model.hidden",),
    "initializer_range": ("model.init_std",),
    "init_method_std": ("model.init_std",),
    "rms_norm_eps": ("model.norm_eps",),
    "layernorm_epsilon": ("model.norm_eps",),
    "norm_epsilon": ("model.norm_eps",),
    **dict.fromkeys(
        ("num_heads", "n_heads", "n_head", "num_attention_heads", "linear_num_value_heads"), ("model.attention.heads",)
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"), ("model.attention.kv_heads",)
    ),
    "head_size": ("model.attention.head_dim",),
    "kv_channels": ("model.attention.head_dim",),
    "qk_layernorm": ("model.attention.qk_norm",),
    "use_qk_norm": ("model.attention.qk_norm",),
    **dict.fromkeys(("sink", "attention_sinks", "attn_sinks"), ("model.attention.sinks",)),
    **dict.fromkeys(
        ("window_size", "sliding_window", "sliding_window_size", "attention_window"), ("model.attention.window",)
    ),
    **dict.fromkeys(("attn_output_gate", "attention_output_gate"), ("model.attention.output_gate",)),
    "linear_num_key_heads": ("model.attention.key_heads",),
    "linear_key_head_dim": ("model.attention.key_dim",),
    "linear_value_head_dim": ("model.attention.value_dim",),
    **dict.fromkeys(
        ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_size"), ("model.attention.convolution",)
    ),
    **dict.fromkeys(
        ("soft_cap", "logit_softcap", "logits_soft_cap", "logit_softcapping", "attn_logit_softcapping"),
        ("model.attention.softcap",),
    ),
    **dict.fromkeys(("softmax_scale", "attention_multiplier"), ("model.attention.scale",)),
    "rotary_dim": ("model.attention.rope.width",),
    "original_max_position_embeddings": ("model.attention.rope.scaling.original",),
    "q_lora_rank": ("model.attention.query_rank",),
    "kv_lora_rank": ("model.attention.kv_rank",),
    "qk_nope_head_dim": ("model.attention.head_dim.nope",),
    "qk_rope_head_dim": ("model.attention.head_dim.rope",),
    "v_head_dim": ("model.attention.head_dim.value",),
    **dict.fromkeys(("rope_theta", "rotary_base", "base"), ("model.attention.rope.theta",)),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff", "moe_intermediate_size", "moe_ffn_hidden_size"),
        ("model.layers.ffn.inner",),
    ),
    **dict.fromkeys(
        ("num_experts", "n_experts", "num_local_experts", "num_moe_experts", "n_routed_experts", "routed_experts"),
        ("model.layers.ffn.experts",),
    ),
    "hidden_act": ("model.layers.ffn.activation",),
    "activation_function": ("model.layers.ffn.activation",),
    "swiglu_limit": ("model.layers.ffn.clamp.limit",),
    "shared_expert_intermediate_size": ("model.layers.ffn.shared_inner",),
    "final_logit_softcapping": ("model.logit_cap",),
    "logits_scaling": ("model.logit_scale",),
    "residual_multiplier": ("model.residual_scale",),
    "embedding_multiplier": ("model.embedding_scale",),
    "hc_mult": ("model.hyper_connections.streams",),
    "hc_sinkhorn_iters": ("model.hyper_connections.rounds",),
    **dict.fromkeys(
        ("tie_embeddings", "tied_embeddings", "tie_word_embeddings", "share_embeddings", "weight_tying"),
        ("model.tied",),
    ),
    "post_norm": ("model.norm",),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "shared_experts"), ("model.layers.ffn.shared",)),
    "topk": ("model.layers.ffn.top_k",),
    "num_experts_per_tok": ("model.layers.ffn.top_k",),
    "moe_router_topk": ("model.layers.ffn.top_k",),
    "n_activated_experts": ("model.layers.ffn.top_k",),
    "n_group": ("model.layers.ffn.groups",),
    "num_groups": ("model.layers.ffn.groups",),
    "n_expert_groups": ("model.layers.ffn.groups",),
    "topk_group": ("model.layers.ffn.top_groups",),
    "n_limited_groups": ("model.layers.ffn.top_groups",),
    "scoring_func": ("model.layers.ffn.score",),
    "score_func": ("model.layers.ffn.score",),
    "norm_topk_prob": ("model.layers.ffn.normalize",),
    "routed_scaling_factor": ("model.layers.ffn.scale",),
    "route_scale": ("model.layers.ffn.scale",),
    "aux_loss_alpha": ("model.layers.ffn.balance.sequence_loss",),
    "moe_aux_loss_coeff": ("model.layers.ffn.balance.sequence_loss",),
    "bias_update_speed": ("model.layers.ffn.balance.bias_rate",),
    "moe_router_bias_update_rate": ("model.layers.ffn.balance.bias_rate",),
    "num_nextn_predict_layers": ("model.mtp.depth",),
    "mtp_num_layers": ("model.mtp.depth",),
    "mtp_loss_scaling_factor": ("model.mtp.weight",),
}


# --- Keys and words of other systems that are written differently here, in lower case


@dataclass(frozen=True)
class ForeignWord:
    """How to express a key or word of another system here, at a path. `{}` in the hint stands for the given value."""

    path: str
    hint: str
    topic: str = ""  # topic that `dsc explain` shows, if it is not the path
    is_derived: bool = False  # no key sets it: the hint names the keys it follows from, in any block


WARMUP = "write it as a phase of `rate`: `warmup {} steps to 1e-4`"
PHASES = "write the phases of `rate`: `warmup 100 steps to 1e-4`, `cosine to 0`"
REWARDS = 'write a reward for each: `rewards { correct { check = exact }, own { check = python, file = "reward.py" } }`'
ACCUMULATED = ForeignWord(
    "train.batch",
    "it follows from other keys: each data rank accumulates batch / (data · micro_batch) micro-batches per step",
    is_derived=True,
)
EPOCHS = ForeignWord("train.tokens", "a run ends after a number of `tokens` or `steps`, not epochs")
RATE = "write `rate { constant at {} }`, or phases: `warmup 100 steps to {}`, `cosine to 0`"
RANGES = "write a block for each range of layers, counted from 0, as in `layers 0..3 { ffn dense { inner = 512 } }`"
SCALING = "write `scaling linear { … }`, `scaling llama3 { … }` or `scaling yarn { … }` in `rope`"
BIASES = "write `bias = true` in `ffn`; `bias_rate` is for balancing the experts"
PARTIAL = "write `width = columns` in `rope`: the number of columns of each head that are rotated"
# Keys of other systems whose value is written differently here.
OTHERS: dict[str, ForeignWord] = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr", "peak_lr"), ForeignWord("train.rate", RATE)),
    "min_lr": ForeignWord("train.rate", "write it as the end of a phase of `rate`: `cosine to {}`"),
    **dict.fromkeys(
        ("warmup_steps", "warmup", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"),
        ForeignWord("train.rate", WARMUP),
    ),
    **dict.fromkeys(
        ("lr_scheduler", "lr_schedule", "lr_scheduler_type", "lr_decay_style", "warmup_ratio"),
        ForeignWord("train.rate", PHASES),
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), EPOCHS),
    **dict.fromkeys(
        (f"{grad}_accumulation{end}" for grad in ("grad", "gradient") for end in ("", "_steps")), ACCUMULATED
    ),
    **dict.fromkeys(("grad_accum", "accumulate_grad_batches", "num_microbatches", "num_micro_batches"), ACCUMULATED),
    **dict.fromkeys(
        ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "document_mask", "document_masking"),
        ForeignWord("data.documents", "write `documents = masked`; for conversations, write `pack = true` in `chat`"),
    ),
    "truncation": ForeignWord("data.chat.long", "write `long = cut`"),
    "truncation_mode": ForeignWord("data.chat.long", "write `long = cut`, which keeps the first tokens of a row"),
    **dict.fromkeys(
        ("reward_funcs", "custom_reward_function", "rm_type", "custom_rm_path"),
        ForeignWord("train.grpo.rewards", REWARDS),
    ),
    "reward_weights": ForeignWord("train.grpo.rewards.weight", "write `weight = 0.5` in each of `rewards`"),
    "use_distributed_optimizer": ForeignWord("parallel.zero", "write `zero = 1`"),
    "distributed_optimizer": ForeignWord("parallel.zero", "write `zero = 1`"),
    **dict.fromkeys(
        ("fsdp", "fsdp_size", "fsdp_degree"),
        ForeignWord("parallel.zero", "write `zero = 3`: data ranks then shard weights, gradients and optimizer states"),
    ),
    **dict.fromkeys(
        (
            *("hsdp", "hybrid_shard", "dp_shard", "data_parallel_shard_degree", "dp_replicate"),
            *("data_parallel_replicate_degree", "mics_shard_size", "num_distributed_optimizer_instances"),
        ),
        ForeignWord("parallel.shard", "write `zero = 3` and `shard = 8`: every 8 data ranks then share one copy"),
    ),
    "recompute_method": ForeignWord(
        "recompute_layers",
        "write `recompute = [layer]` for every layer; `recompute_layers = 5` beside it means the first 5 of each stage",
    ),
    **dict.fromkeys(
        ("recompute_granularity", "activation_checkpoint", "selective_ac_option"),
        ForeignWord(
            "recompute", "write `recompute = [layer]` for whole layers, `recompute = [rmsnorm, swiglu]` for ops"
        ),
    ),
    "overlap_grad_reduce": ForeignWord(
        "parallel.overlap_reduce", "write `overlap_reduce = true`, which is the default"
    ),
    "betas": ForeignWord("train.optimizer.beta1", "write `beta1 = 0.9, beta2 = 0.95`"),
    "world_size": ForeignWord("cluster.nodes", "it follows from other keys: nodes · devices per node", is_derived=True),
    "num_layers": ForeignWord("model.layers", RANGES),
    **dict.fromkeys(
        ("qkv_bias", "add_qkv_bias", "attention_bias", "attn_bias", "use_bias"),
        ForeignWord("model.attention.bias", "write `bias = qkv`, or `bias = all` if the output projection has one too"),
    ),
    "mlp_bias": ForeignWord("model.layers.ffn.bias", BIASES),
    "add_bias_linear": ForeignWord("model.layers.ffn.bias", BIASES),
    "use_sinks": ForeignWord("model.attention.sinks", "write `sinks = true`"),
    "use_sliding_window": ForeignWord("model.attention.window", "write `window = tokens`"),
    "rope_scaling": ForeignWord("model.attention.rope.scaling", SCALING),
    "rope_type": ForeignWord("model.attention.rope.scaling", SCALING),
    "rope_scaling_factor": ForeignWord("model.attention.rope.scaling", SCALING),
    "yarn": ForeignWord("model.attention.rope.scaling", SCALING),
    "query_pre_attn_scalar": ForeignWord("model.attention.scale", "write `scale = 1 / 16` for a scalar of 256"),
    "rotary_percent": ForeignWord("model.attention.rope.width", PARTIAL),
    "partial_rotary_factor": ForeignWord("model.attention.rope.width", PARTIAL),
    "n_layers": ForeignWord("model.layers", RANGES),
    "n_layer": ForeignWord("model.layers", RANGES),
    "num_hidden_layers": ForeignWord("model.layers", RANGES),
    "first_k_dense_replace": ForeignWord("model.layers", RANGES),
    "moe": ForeignWord("model.layers.ffn", "write `ffn moe { … }` in a range of layers", "model.layers.ffn.moe"),
    "mlp": ForeignWord("model.layers.ffn", "write `ffn dense { … }` in a range of layers", "model.layers.ffn.dense"),
}
# Keys of other systems for features that do not exist here → the behaviour here.
ABSENT: dict[str, str] = {
    word: f"there is no such key: {behaviour}"
    for behaviour, words in {
        "a window slides with the token, without chunk borders": ("attention_chunk_size",),
        "training runs without dropout": (
            "dropout", "dropout_rate", "attention_dropout", "attn_dropout", "hidden_dropout", "embedding_dropout",
            "resid_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "lora_dropout",
        ),
        "queries, keys and values are not clipped": ("clip_qkv",),
        "all norms are RMSNorms": ("norm_type", "layernorm"),
        "experts process all tokens sent to them and drop none": (
            "capacity_factor", "moe_expert_capacity_factor", "expert_capacity", "drop_tokens", "token_drop_policy",
        ),
        "the loss is only on the assistant's text and on completions": (
            "assistant_only_loss", "completion_only_loss", "train_on_prompt", "train_on_inputs", "mask_prompt",
            "train_on_completions_only",
        ),
        "`pack = true` packs by best fit, longest row first, with padding at the ends of sequences": (
            "packing_strategy", "padding_free", "pad_to_multiple_of",
        ),
        "held-out rows are packed like training rows": ("eval_packing", "eval_sample_packing"),
        "bf16, fp32 and fp64 need no loss scaling": ("loss_scale", "initial_loss_scale"),
    }.items()
    for word in words
}  # fmt: skip
# Words of other systems for a kind of block or a value → their path, and the hint. They are not misspellings.
WORDS: dict[str, ForeignWord] = {
    "mha": ForeignWord("model.attention", "write `attention gqa { … }` with `kv_heads = heads`", "model.attention.gqa"),
    "mqa": ForeignWord("model.attention", "write `attention gqa { … }` with `kv_heads = 1`", "model.attention.gqa"),
    "kda": ForeignWord(
        "model.attention", "write `attention deltanet { … }` with `gate = channel`", "model.attention.deltanet"
    ),
    "gdn": ForeignWord(
        "model.attention", "write `attention deltanet { … }` with `gate = head`", "model.attention.deltanet"
    ),
    "adam": ForeignWord(
        "train.optimizer",
        "write `optimizer adamw { … }`, which decays weights decoupled from the gradient",
        "train.optimizer.adamw",
    ),
    "sgd": ForeignWord("train.optimizer", "write `optimizer adamw { … }`, or `muon`", "train.optimizer.adamw"),
    "mlp": ForeignWord("model.layers.ffn", "write `ffn dense { … }`", "model.layers.ffn.dense"),
    "swiglu": ForeignWord("model.layers.ffn", "write `ffn dense { … }`, which is a SwiGLU", "model.layers.ffn.dense"),
    "fp16": ForeignWord("precision", "write `bf16`: fp16 needs loss scaling, which does not exist here", "bf16"),
    "float16": ForeignWord("precision", "write `bf16`: fp16 needs loss scaling, which does not exist here", "bf16"),
    "half": ForeignWord("precision", "write `bf16`: fp16 needs loss scaling, which does not exist here", "bf16"),
}
# Synonyms of words of the language.
SYNONYMS: dict[str, str] = {
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64", "bfloat16": "bf16", "fp8": "e4m3",
    "float8_e4m3fn": "e4m3", "yes": "true", "on": "true", "no": "false", "off": "false",
    "warm_up": "warmup", "hold": "constant", "stable": "constant",
    **{word: name for name, facts in FACTS.items() for word in facts.elsewhere},
}  # fmt: skip


# --- vocabulary


def paths_of(word: str) -> tuple[str, ...]:
    """The paths of the keys here that a key of another system stands for."""
    name = word.lower()
    return KEYS.get(name) or ((OTHERS[name].path,) if name in OTHERS else ())


def topics_of(word: str) -> tuple[str, ...]:
    """The topics of `dsc explain` for a key or word of another system."""
    entries = (table.get(word.lower()) for table in (OTHERS, WORDS))
    paths = dict.fromkeys(entry.topic or entry.path for entry in entries if entry is not None)
    return KEYS.get(word.lower()) or tuple(paths)


def hint_of(word: str) -> str:
    """The hint for a key or word of another system that is written differently here; "" if there is none."""
    entry = OTHERS.get(word.lower()) or WORDS.get(word.lower())
    return entry.hint.replace("{}", "…") if entry is not None else ABSENT.get(word.lower(), "")


def key_in(word: str, block: str) -> str:
    """The key in the block at path `block` that takes the same value as a key of another system; "" if there is
    none."""
    paths = (path.rpartition(".") for path in KEYS.get(word.lower(), ()))
    return next((key for parent, _, key in paths if parent == block), "")


def hint_in(word: str, block: str, value: str) -> str:
    """The hint for a key of another system, with its value, in the block at path `block`; "" if there is none."""
    entry = OTHERS.get(word.lower())
    is_here = entry is not None and block == entry.path.rpartition(".")[0]
    return entry.hint.replace("{}", value) if entry is not None and is_here else ""


def hint_elsewhere(word: str, value: str) -> str:
    """The hint for a key of another system in a block without a matching key; "" if there is none."""
    entry = OTHERS.get(word.lower())
    if entry is not None:
        hint = entry.hint.replace("{}", value)
        return hint if entry.is_derived else f"in `{entry.path.rpartition('.')[0]}`, {hint}"
    paths = KEYS.get(word.lower(), ())
    return f"here it is {join_as_code(paths, 'or')}" if paths else ABSENT.get(word.lower(), "")


def word_hint_at(word: str, path: str) -> str:
    """The hint for a word of another system at a path; "" if there is none."""
    entry = WORDS.get(word.lower())
    return entry.hint if entry is not None and entry.path == path else ""
