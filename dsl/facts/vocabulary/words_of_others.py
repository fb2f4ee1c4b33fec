"""Keys of other training systems that are written in another way here, and words of theirs, in lower case."""

from __future__ import annotations

from dataclasses import dataclass

from dsl.facts.schedules import FACTS


@dataclass(frozen=True)
class Other:
    """What says the same in another form, at a path. `{}` is the value that was given."""

    path: str
    hint: str
    topic: str = ""  # what `dsc explain` tells about it, where that is not the path
    is_derived: bool = False  # nobody writes it: the hint says what it follows from, wherever it stands


WARMUP = "write it as a phase of `rate`: `warmup {} steps to 1e-4`"
PHASES = "write the phases of `rate`: `warmup 100 steps to 1e-4`, `cosine to 0`"
REWARDS = 'write a reward for each: `rewards { correct { check = exact }, own { check = python, file = "reward.py" } }`'
ACCUMULATED = Other(
    "train.batch",
    "it follows from the others: each data rank accumulates batch / (data · micro_batch) micro-batches a step",
    is_derived=True,
)
EPOCHS = Other("train.tokens", "a run ends after a number of `tokens` or `steps`, not of epochs")
RATE = "write `rate { constant at {} }`, or phases: `warmup 100 steps to {}`, `cosine to 0`"
RANGES = "write a block for each range of layers, counted from 0, as in `layers 0..3 { ffn dense { inner = 512 } }`"
SCALING = "write `scaling linear { … }`, `scaling llama3 { … }` or `scaling yarn { … }` in `rope`"
BIASES = "write `bias = true` in `ffn`; what balances experts is `bias_rate`"
PARTIAL = "write `width = columns` in `rope`: how many columns of each head are rotated"
# A key of others whose value is written in another way here.
OTHERS: dict[str, Other] = {
    **dict.fromkeys(("lr", "learning_rate", "max_lr", "peak_lr"), Other("train.rate", RATE)),
    "min_lr": Other("train.rate", "write it as the goal of a phase of `rate`: `cosine to {}`"),
    **dict.fromkeys(
        ("warmup_steps", "warmup", "num_warmup_steps", "lr_warmup_steps", "lr_warmup_iters"),
        Other("train.rate", WARMUP),
    ),
    **dict.fromkeys(
        ("lr_scheduler", "lr_schedule", "lr_scheduler_type", "lr_decay_style", "warmup_ratio"),
        Other("train.rate", PHASES),
    ),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), EPOCHS),
    **dict.fromkeys(
        (f"{grad}_accumulation{end}" for grad in ("grad", "gradient") for end in ("", "_steps")), ACCUMULATED
    ),
    **dict.fromkeys(("grad_accum", "accumulate_grad_batches", "num_microbatches", "num_micro_batches"), ACCUMULATED),
    **dict.fromkeys(
        ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "document_mask", "document_masking"),
        Other("data.documents", "write `documents = masked`; of conversations, `pack = true` in `chat` does it"),
    ),
    "truncation": Other("data.chat.long", "write `long = cut`"),
    "truncation_mode": Other("data.chat.long", "write `long = cut`, which keeps the first tokens of a row"),
    **dict.fromkeys(
        ("reward_funcs", "custom_reward_function", "rm_type", "custom_rm_path"), Other("train.grpo.rewards", REWARDS)
    ),
    "reward_weights": Other("train.grpo.rewards.weight", "write `weight = 0.5` in each of `rewards`"),
    "use_distributed_optimizer": Other("parallel.zero", "write `zero = 1`"),
    "distributed_optimizer": Other("parallel.zero", "write `zero = 1`"),
    **dict.fromkeys(
        ("fsdp", "fsdp_size", "fsdp_degree", "hsdp", "dp_shard", "data_parallel_shard_degree"),
        Other("parallel.zero", "write `zero = 3`: data ranks then divide weights, gradients and optimizer states"),
    ),
    "recompute_method": Other(
        "recompute_layers",
        "write `recompute = [layer]` for every layer; `recompute_layers = 5` beside it means the first 5 of each stage",
    ),
    **dict.fromkeys(
        ("recompute_granularity", "activation_checkpoint", "selective_ac_option"),
        Other("recompute", "write `recompute = [layer]` for whole layers, `recompute = [rmsnorm, swiglu]` for ops"),
    ),
    "overlap_grad_reduce": Other("parallel.overlap_reduce", "write `overlap_reduce = true`, as without it"),
    "betas": Other("train.optimizer.beta1", "write `beta1 = 0.9, beta2 = 0.95`"),
    "world_size": Other("cluster.nodes", "it follows from the others: nodes · devices of a node", is_derived=True),
    "num_layers": Other("model.layers", RANGES),
    **dict.fromkeys(
        ("qkv_bias", "add_qkv_bias", "attention_bias", "attn_bias", "use_bias"),
        Other("model.attention.bias", "write `bias = qkv`, or `bias = all` if what attention returns has one too"),
    ),
    "mlp_bias": Other("model.layers.ffn.bias", BIASES),
    "add_bias_linear": Other("model.layers.ffn.bias", BIASES),
    "use_sinks": Other("model.attention.sinks", "write `sinks = true`"),
    "use_sliding_window": Other("model.attention.window", "write `window = tokens`"),
    "rope_scaling": Other("model.attention.rope.scaling", SCALING),
    "rope_type": Other("model.attention.rope.scaling", SCALING),
    "rope_scaling_factor": Other("model.attention.rope.scaling", SCALING),
    "yarn": Other("model.attention.rope.scaling", SCALING),
    "query_pre_attn_scalar": Other("model.attention.scale", "write `scale = 1 / 16` for a scalar of 256"),
    "rotary_percent": Other("model.attention.rope.width", PARTIAL),
    "partial_rotary_factor": Other("model.attention.rope.width", PARTIAL),
    "n_layers": Other("model.layers", RANGES),
    "n_layer": Other("model.layers", RANGES),
    "num_hidden_layers": Other("model.layers", RANGES),
    "first_k_dense_replace": Other("model.layers", RANGES),
    "moe": Other("model.layers.ffn", "write `ffn moe { … }` in a range of layers", "model.layers.ffn.moe"),
    "mlp": Other("model.layers.ffn", "write `ffn dense { … }` in a range of layers", "model.layers.ffn.dense"),
}

# Keys of others for what the language has not → what it has, or does, instead.
ABSENT: dict[str, str] = {
    word: f"there is no such key: {instead}"
    for instead, words in {
        "a window slides with the token, and chunks have no borders": ("attention_chunk_size",),
        "nothing is dropped out": (
            "dropout", "dropout_rate", "attention_dropout", "attn_dropout", "hidden_dropout", "embedding_dropout",
            "resid_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "lora_dropout",
        ),
        "queries, keys and values are not cut off": ("clip_qkv",),
        "norms are RMSNorms": ("norm_type", "layernorm"),
        "experts take every row that is sent to them, and drop none": (
            "capacity_factor", "moe_expert_capacity_factor", "expert_capacity", "drop_tokens", "token_drop_policy",
        ),
        "the loss is on what the assistant says and on completions, and on nothing else": (
            "assistant_only_loss", "completion_only_loss", "train_on_prompt", "train_on_inputs", "mask_prompt",
            "train_on_completions_only",
        ),
        "`pack = true` packs by best fit, the longest row first, and leaves padding at the ends of sequences": (
            "packing_strategy", "padding_free", "pad_to_multiple_of",
        ),
        "rows that are held out are packed as those that are trained on": ("eval_packing", "eval_sample_packing"),
        "nothing needs a scale of the loss in bf16, fp32 or fp64": ("loss_scale", "initial_loss_scale"),
    }.items()
    for word in words
}  # fmt: skip

# A word of others for what a block or a value is → where it stands, and what to write. None of them is a misspelling.
WORDS: dict[str, Other] = {
    "mha": Other("model.attention", "write `attention gqa { … }` with `kv_heads = heads`", "model.attention.gqa"),
    "mqa": Other("model.attention", "write `attention gqa { … }` with `kv_heads = 1`", "model.attention.gqa"),
    "kda": Other(
        "model.attention", "write `attention deltanet { … }` with `gate = channel`", "model.attention.deltanet"
    ),
    "gdn": Other("model.attention", "write `attention deltanet { … }` with `gate = head`", "model.attention.deltanet"),
    "adam": Other(
        "train.optimizer",
        "write `optimizer adamw { … }`, which decays weights apart from the gradient",
        "train.optimizer.adamw",
    ),
    "sgd": Other("train.optimizer", "write `optimizer adamw { … }`, or `muon`", "train.optimizer.adamw"),
    "mlp": Other("model.layers.ffn", "write `ffn dense { … }`", "model.layers.ffn.dense"),
    "swiglu": Other("model.layers.ffn", "write `ffn dense { … }`, which is a SwiGLU", "model.layers.ffn.dense"),
    "fp16": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
    "float16": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
    "half": Other("precision", "write `bf16`: fp16 needs a scale of the loss, which nothing here has", "bf16"),
}

# A word that is the same as one of ours.
SAME: dict[str, str] = {
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64", "bfloat16": "bf16", "fp8": "e4m3",
    "float8_e4m3fn": "e4m3", "yes": "true", "on": "true", "no": "false", "off": "false",
    "warm_up": "warmup", "hold": "constant", "stable": "constant",
    **{word: name for name, facts in FACTS.items() for word in facts.elsewhere},
}  # fmt: skip
